# SPDX-License-Identifier: Apache-2.0
"""Reads a project's source: which threads may call it, and what several processes change for it.

What binds an object to a thread (SQLite, Playwright, greenlets, `threading.local`, context
variables, a GPU's context) is a module that the code has to import. So the source of the modules
that hold an environment's class is read, and of those that they import: where nothing is imported
but modules that are known to be the same on every thread, its calls may move from thread to thread.
Extension modules, modules without a source and code made at run time count as bound, and so does
whatever this cannot read: it only makes sessions faster, and may stop none.

What a project's code does otherwise when several processes serve its sessions:

    module state     a function changes a list, a counter, an object, … of its module or class
    random numbers   the import seeds a generator, which each process seeds again
    pids             the import asks for its pid, which serving processes do not have

The source of the project's modules that are loaded is read, nothing is run; what is called a cache
is not meant to be shared. The other differences are found in the app (`upstream_project.py`); all
are in the table of `docs/compatibility.md`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from . import interfaces

MAX_MODULES = 50  # of a project that are read, before it is taken for bound
MAX_SOURCE_BYTES = 256 * 1024  # of one of them: reading takes a hundred times as much memory

# Of the standard library, those without a state for each thread.
_PLAIN = frozenset(
    {"__future__", "abc", "array", "base64", "binascii", "bisect", "builtins", "cmath"}
    | {"collections", "copy", "dataclasses", "datetime", "difflib", "enum", "fractions"}
    | {"functools", "hashlib", "heapq", "itertools", "json", "logging", "math", "numbers"}
    | {"operator", "random", "re", "secrets", "statistics", "string", "struct", "textwrap", "time"}
    | {"types", "typing", "unicodedata", "uuid", "zlib"}
)
_KNOWN = frozenset(
    {"pydantic", "typing_extensions", interfaces.__name__}
    | {"openenv.core.env_server.interfaces", "openenv.core.env_server.types"}
)
_CODE_AT_RUN_TIME = frozenset({"__import__", "compile", "eval", "exec"})


def is_bound_to_thread(env_class: type) -> bool:
    """Return whether the calls of a class's environments have to stay on one thread each.

    A class that says `THREAD_SAFE = False` itself is bound, whatever it imports. The answer is
    kept, also for processes that are forked later.
    """
    hashable: Any = env_class
    try:
        return _is_bound(hashable)
    except Exception:  # what cannot be read may be anything
        return True


@functools.cache
def _is_bound(env_class: type) -> bool:
    owners = [owner for owner in env_class.__mro__ if not _is_plain(owner.__module__)]
    if any(vars(owner).get("THREAD_SAFE") is False for owner in owners):
        return True
    pending = {owner.__module__ for owner in owners}
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen or _is_plain(name):
            continue
        seen.add(name)
        imported = _imports_of(name)
        if imported is None or len(seen) > MAX_MODULES:
            return True
        pending |= {each for each in imported if not _is_plain(each)}
        # What is not plain of the standard library need not be read.
        if any(each.partition(".")[0] in sys.stdlib_module_names for each in pending):
            return True
    return False


def _is_plain(name: str) -> bool:
    return name in _KNOWN or name.partition(".")[0] in _PLAIN


def _imports_of(name: str) -> set[str] | None:
    """Return what a loaded module imports; None if that is not to be known."""
    try:
        module = sys.modules[name]
        source = inspect.getsource(module)
        if len(source) > MAX_SOURCE_BYTES:
            return None
        tree = ast.parse(source)
    except (KeyError, OSError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    finally:
        linecache.clearcache()
    found: set[str] = set()
    for node, is_late in nodes_of(tree):
        if isinstance(node, ast.Name) and node.id in _CODE_AT_RUN_TIME:
            return None
        for imported in _named_by(node, module.__package__ or ""):
            # One that is not there now: the module's body has run, its functions may run later.
            if imported in sys.modules or _is_plain(imported) or is_late:
                found.add(imported)
    return found


def nodes_of(tree: ast.AST) -> Iterator[tuple[Any, bool]]:
    """Yield all nodes of a module, and whether they run after it was imported."""
    pending: list[tuple[Any, bool]] = [(tree, False)]
    while pending:
        node, is_late = pending.pop()
        yield node, is_late
        is_late |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, is_late) for child in ast.iter_child_nodes(node)]


def _named_by(node: Any, package: str) -> Iterator[str]:
    """Yield the modules that an import statement names."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
            if alias.asname is None:
                yield alias.name.partition(".")[0]  # `import a.b` gives the code all of `a`
    elif isinstance(node, ast.ImportFrom):
        relative = "." * node.level + (node.module or "")
        try:
            base = importlib.util.resolve_name(relative, package) if node.level else relative
        except ImportError:  # beyond the top: the code has had the same answer
            return
        for alias in node.names:
            part = f"{base}.{alias.name}"
            yield part if part in sys.modules else base


_MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MAKERS = frozenset({"list", "dict", "set", "deque", "defaultdict", "count", "default_rng"})
_CHANGES = frozenset(
    {"append", "appendleft", "add", "extend", "insert", "update", "setdefault", "remove"}
    | {"discard", "pop", "popleft", "popitem", "clear", "put", "put_nowait"}
    # Of a generator of random numbers, of which each process draws the same ones.
    | {"random", "randint", "randrange", "uniform", "gauss", "normal", "integers", "choice"}
    | {"choices", "sample", "shuffle", "permutation"}
)
_FIELDS = ("Field", "PrivateAttr")  # pydantic's: each instance has its own
_CLASSES = ("cls", "type(self)", "self.__class__")
_SEEDS = ("random.seed", "torch.manual_seed")


def differences_in(folders: Sequence[str], newest: str) -> list[str]:
    """Return a sentence for each name that can have different values in processes of this project.

    Only modules below `folders` that were imported after `newest` are examined. Earlier ones may be
    shared with a zygote, and reading an attribute of a shared module copies its memory page.
    """
    imported = list(takewhile(newest.__ne__, reversed(sys.modules)))  # at once: threads import, too
    modules = [sys.modules[name] for name in imported if name in sys.modules]
    found: list[str] = []
    left = MAX_SOURCE_BYTES  # of all
    for path in _files_below(folders, modules):
        with suppress(Exception):  # what cannot be read is not judged
            if (left := left - path.stat().st_size) > 0:
                found += differences_of(ast.parse(path.read_bytes()), path.name)
    return found


def _files_below(folders: Sequence[str], modules: Iterable[ModuleType]) -> list[Path]:
    found = (each for module in modules for each in [file_below(folders, module)] if each)
    return sorted(path for path in {*found} if path.suffix == ".py")[:MAX_MODULES]


def file_below(folders: Sequence[str], module: ModuleType) -> Path | None:
    """Return the file of a module of the project in `folders`; None: it is no such module."""
    name = getattr(module, "__file__", None)
    path = Path(name).resolve() if isinstance(name, str) else Path()
    is_own = any(Path(folder).resolve() in path.parents for folder in folders)
    return path if is_own and "site-packages" not in path.parts else None


def differences_of(module: ast.Module, file: str) -> Iterator[str]:
    """Return a sentence about what was found in one module."""
    late = [node for node, is_late in nodes_of(module) if is_late]
    # Names that functions bind themselves.
    local = {node.id for node in late if isinstance(node, ast.Name) and _is_stored(node)}
    local |= {node.arg for node in late if isinstance(node, ast.arg)}
    local -= {name for node in late if isinstance(node, ast.Global) for name in node.names}
    shared = {*_bound(module)} - local
    # Assigned in any class of the module: an attribute can have the name of another class's field.
    stored = (each for each, _ in nodes_of(module) if isinstance(each, ast.Attribute))
    own = {each.attr for each in stored if _is_stored(each) and ast.unparse(each.value) == "self"}
    for owner in (node for node in module.body if isinstance(node, ast.ClassDef)):
        shared |= {f"self.{name}" for name in _bound(owner) if name not in own}
        shared |= {f"{who}.{name}" for name in _bound(owner) for who in (*_CLASSES, owner.name)}
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
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "next" and node.args:
        target = node.args[0]
    name = "" if target is None else ast.unparse(target)
    return name if not shared.isdisjoint((name, name.partition(".")[0])) else None


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _bound(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that a module or class binds to what can be changed, or counted up."""
    for node in scope.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        value = getattr(node, "value", None)
        called = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        is_object = called in _MAKERS or (called[:1].isupper() and called not in _FIELDS)
        if is_object or isinstance(value, (*_MUTABLE, ast.Constant)):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
