# SPDX-License-Identifier: Apache-2.0
"""Tells whether an environment's code can notice on which thread it is called.

What binds an object to a thread (SQLite, Playwright, greenlets, `threading.local`, context
variables, a GPU's context) is a module that the code has to import. So the source of the modules
that hold an environment's class is read, and of those that they import: where nothing is imported
but modules that are known to be the same on every thread, its calls may move from thread to thread.
Extension modules, modules without a source and code made at run time count as bound, and so does
whatever this cannot read: it only makes sessions faster, and may stop none.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Iterator
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
    """Tell whether the calls of a class's environments have to stay on one thread each.

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
        if imported is None or len(seen) > MAX_MODULES or any(map(_may_bind, imported)):
            return True
        pending |= imported
    return False


def _is_plain(name: str) -> bool:
    return name in _KNOWN or name.partition(".")[0] in _PLAIN


def _may_bind(name: str) -> bool:
    """Tell of a module that it need not be read: of the standard library, and not plain."""
    return not _is_plain(name) and name.partition(".")[0] in sys.stdlib_module_names


def _imports_of(name: str) -> set[str] | None:
    """Return what a loaded module imports; None if that is not to be known."""
    module = sys.modules.get(name)
    if module is None:
        return None
    try:
        source = inspect.getsource(module)
        tree = ast.parse(source) if len(source) <= MAX_SOURCE_BYTES else None
    except (OSError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    finally:
        linecache.clearcache()
    if tree is None:
        return None
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
