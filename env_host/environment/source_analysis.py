# SPDX-License-Identifier: Apache-2.0
"""Finds in a project's source which threads may call it, and what differs in several processes.

Code that binds an object to a thread (SQLite, Playwright, greenlets, `threading.local`, context
variables, a GPU's context) has to import a module for that. So the modules that define an
environment's class are read, and those that they import. If all of these are known to behave the
same on every thread, calls may move from thread to thread. Extension modules, modules without a
source, code made at run time, and whatever cannot be read count as bound: this analysis only makes
sessions faster, and must not stop any.

Differences when several processes serve a project's sessions:

    module state     a function changes a list, a counter, an object, … of its module or class
    random numbers   the import seeds a generator, which each process seeds again
    pids             the import reads its pid; serving processes have other pids

Only the source of loaded modules is read; nothing is run. A name with `cache` or `memo` is not
reported. The other differences are found in the app (`upstream_project.py`); all are in the table
of `docs/compatibility.md`.
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

MAX_MODULES = 50  # that are read of a project; one with more counts as bound
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
    """Return whether all calls to an environment of this class have to be on one thread.

    A class with `THREAD_SAFE = False` is bound, whatever it imports. The answer is cached, also
    for processes that are forked later.
    """
    return _plain_modules(env_class) is None


@functools.cache
def state_outside_of(env_class: type) -> tuple[str, ...]:
    """Return what keeps, or may keep, state of sessions of this class outside of its instances.

    Empty only if all modules that define it could be read, with those that they import; if these
    are plain, change no name of a module or class, and use nothing of `random` but `Random`.
    """
    if (modules := _plain_modules(env_class)) is None:
        return ("the modules of the class, or what they import, may keep a state",)
    found = []
    for name in modules:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
        found += [each.partition(", which")[0] for each in differences_of(tree, f"{name}.py")]
        if any(_uses_shared_generator(node) for node, _ in nodes_of(tree)):
            found.append(f"{name} uses the random numbers of the whole process")
    linecache.clearcache()
    return tuple(found)


def _uses_shared_generator(node: ast.AST) -> bool:
    """Return whether a node uses anything of the module `random` except `random.Random`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "random" and {each.name for each in node.names} != {"Random"}
    if isinstance(node, ast.Import):
        return any(each.name == "random" and each.asname for each in node.names)
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value) == "random" and node.attr != "Random"
    # As a value of its own, it is in no attribute: `rng = random`.
    parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.Name)]
    return any(each.id == "random" for each in parts)


def _plain_modules(env_class: Any) -> frozenset[str] | None:
    """Return the modules of a class and of what they import; None if one may be bound."""
    try:
        return _modules_of(env_class)
    except Exception:  # what cannot be read may be anything
        return None


@functools.cache
def _modules_of(env_class: type) -> frozenset[str] | None:
    owners = [owner for owner in env_class.__mro__ if not _is_plain(owner.__module__)]
    if any(vars(owner).get("THREAD_SAFE") is False for owner in owners):
        return None
    pending = {owner.__module__ for owner in owners}
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen or _is_plain(name):
            continue
        seen.add(name)
        imported = _imports_of(name)
        if imported is None or len(seen) > MAX_MODULES:
            return None
        pending |= {each for each in imported if not _is_plain(each)}
        # A module of the standard library that is not plain counts as bound without being read.
        if any(each.partition(".")[0] in sys.stdlib_module_names for each in pending):
            return None
    return frozenset(seen)


def _is_plain(name: str) -> bool:
    return name in _KNOWN or name.partition(".")[0] in _PLAIN


def _imports_of(name: str) -> set[str] | None:
    """Return what a loaded module imports; None if that cannot be known."""
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
            # The module's body has run: what it names and did not load, only functions can import.
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
        except ImportError:  # beyond the top-level package: it failed for the project, too
            return
        for alias in node.names:
            part = f"{base}.{alias.name}"
            yield part if part in sys.modules else base


_MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MAKERS = frozenset({"list", "dict", "set", "deque", "defaultdict", "count", "default_rng"})
_CHANGES = frozenset(
    {"append", "appendleft", "add", "extend", "insert", "update", "setdefault", "remove"}
    | {"discard", "pop", "popleft", "popitem", "clear", "put", "put_nowait"}
    | {"execute", "executemany", "executescript"}  # of a database in memory
    # Methods of a generator of random numbers: each process draws the same numbers.
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
    left = MAX_SOURCE_BYTES  # of all modules together
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
                f"{file}:{node.lineno} changes {name.removeprefix('self.')}, which only sessions "
                "of the same process share; --shards 1 serves all sessions in one process"
            )
        asked = ast.unparse(node.func) if isinstance(node, ast.Call) and not is_late else ""
        if asked.endswith(_SEEDS):
            yield (
                f"{file}:{node.lineno} seeds random numbers when it is imported; each serving "
                "process seeds them again; for repeatable numbers let reset use its seed"
            )
        if asked == "os.getpid":
            yield f"{file}:{node.lineno} reads the pid at its import; sessions have other pids"


def _changed(node: ast.AST, shared: set[str]) -> str | None:
    """Return which of the names a node of a function changes."""
    target: ast.AST | None = None
    if isinstance(node, ast.Global):
        return next((name for name in node.names if name in shared), None)
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        target = node.value
    elif isinstance(node, ast.Attribute) and _is_stored(node):
        target = node
    elif isinstance(node, ast.Attribute):
        target = node.value if node.attr in _CHANGES else None
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "next" and node.args:
        target = node.args[0]
    name = "" if target is None else ast.unparse(target)
    return name if not shared.isdisjoint((name, name.partition(".")[0])) else None


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _bound(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that a module or class binds to a mutable object or a constant."""
    for node in scope.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        value = getattr(node, "value", None)
        called = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        is_object = called in _MAKERS or (called[:1].isupper() and called not in _FIELDS)
        is_object |= called == "connect" and value is not None and ":memory:" in ast.unparse(value)
        if is_object or isinstance(value, (*_MUTABLE, ast.Constant)):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
