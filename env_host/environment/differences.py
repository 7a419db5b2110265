# SPDX-License-Identifier: Apache-2.0
"""Finds what a project's code does otherwise when several processes serve its sessions.

    module state     a function changes a list, a counter, … of its module or class
    random numbers   the import seeds a generator, which each process seeds again
    pids             the import asks for its pid, which serving processes do not have

The source of the project's modules that are loaded is read, nothing is run; what is called a cache
is not meant to be shared. The other differences are found in the app (`upstream_project.py`); all
are in the table of `docs/compatibility.md`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .thread_affinity import MAX_MODULES, MAX_SOURCE_BYTES, nodes_of

_MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MAKERS = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"})
_CHANGES = frozenset(
    {"append", "appendleft", "add", "extend", "insert", "update", "setdefault", "remove"}
    | {"discard", "pop", "popleft", "popitem", "clear"}
)
_SEEDS = ("random.seed", "torch.manual_seed")


def differences_in(folders: Sequence[str]) -> list[str]:
    """Say what was found in the loaded modules below these folders, a sentence for each name."""
    found: list[str] = []
    left = MAX_SOURCE_BYTES  # of all
    for path in _files_below(folders):
        with suppress(Exception):  # what cannot be read is not judged
            if (left := left - path.stat().st_size) > 0:
                found += differences_of(ast.parse(path.read_bytes()), path.name)
    return found


def _files_below(folders: Sequence[str]) -> list[Path]:
    roots = [Path(folder).resolve() for folder in folders]
    named = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {Path(name).resolve() for name in named if isinstance(name, str)}
    return sorted(
        path
        for path in paths
        if path.suffix == ".py"
        and "site-packages" not in path.parts
        and any(root in path.parents for root in roots)
    )[:MAX_MODULES]


def differences_of(module: ast.Module, file: str) -> Iterator[str]:
    """Say what was found in one module."""
    shared = {*_bound(module)} - _local_names(module)
    # Assigned in any class of the module: an attribute can have the name of another class's field.
    own = {node.attr for node, _ in nodes_of(module) if _is_set_on_self(node)}
    for owner in (node for node in module.body if isinstance(node, ast.ClassDef)):
        shared |= {f"self.{name}" for name in _bound(owner) if name not in own}
        shared |= {f"{who}.{name}" for name in _bound(owner) for who in ("cls", owner.name)}
    found = set()
    for node, is_late in sorted(nodes_of(module), key=lambda one: getattr(one[0], "lineno", 0)):
        name = _changed(node, shared) if is_late else None
        words = {*(name or "").lower().replace(".", "_").split("_")}
        if name is not None and name not in found and not {"cache", "memo"} & words:
            found.add(name)
            yield (
                f"{file}:{node.lineno} changes {name.removeprefix('self.')}, which sessions share "
                "within a process alone; --shards 1 serves them all in one"
            )
        asked = ast.unparse(node.func) if isinstance(node, ast.Call) and not is_late else ""
        if asked.endswith(_SEEDS):
            yield (
                f"{file}:{node.lineno} seeds random numbers at the import; each serving process "
                "seeds them again; they are repeatable by a seed that reset uses"
            )
        if asked == "os.getpid":
            yield f"{file}:{node.lineno} asks for the pid at the import; sessions run in others"


def _changed(node: ast.AST, shared: set[str]) -> str | None:
    """Return which of the names a node of a function changes."""
    target: ast.AST | None = None
    if isinstance(node, ast.Global):
        return next((name for name in node.names if name in shared), None)
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        target = node.value
    elif isinstance(node, ast.Attribute) and _is_stored(node):
        target = node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        target = node.func.value if node.func.attr in _CHANGES else None
    name = "" if target is None else ast.unparse(target)
    return name if name in shared else None


def _local_names(module: ast.Module) -> set[str]:
    """Return the names that functions bind themselves."""
    late = [node for node, is_late in nodes_of(module) if is_late]
    written = {node.id for node in late if isinstance(node, ast.Name) and _is_stored(node)}
    arguments = {node.arg for node in late if isinstance(node, ast.arg)}
    return (written | arguments) - {
        name for node in late if isinstance(node, ast.Global) for name in node.names
    }


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _bound(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that a module or class binds to what can be changed, or counted up."""
    for node in scope.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        value = getattr(node, "value", None)
        called = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        if isinstance(value, (*_MUTABLE, ast.Constant)) or called in _MAKERS:
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _is_set_on_self(node: Any) -> bool:
    return (
        isinstance(node, ast.Attribute) and _is_stored(node) and ast.unparse(node.value) == "self"
    )
