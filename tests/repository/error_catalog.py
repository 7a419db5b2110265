# SPDX-License-Identifier: Apache-2.0
"""Every message that the product shows when something fails, read from its source.

A message is what a user-visible error is made with: a call of one of the classes of SHOWN, of one
that inherits from them, or of what else MAKERS names. Its text is taken from the syntax tree, and
nothing is imported: agents of engines import libraries that may not be here. What a text is filled
in with stands in capitals, or as `…`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("bench", "cli", "client", "env_host", "environments", "executor", "operations", "processes"),
    *("requests_db", "rollouts", "sdk", "server", "shim", "system", "tracing"),
)
# Roots of what is shown to somebody; what inherits from these is, too.
SHOWN = {
    *("ApiError", "BenchError", "ClientError", "DaemonError", "DatabaseError", "EngineError"),
    *("EnvironmentsError", "HostError", "PlanError", "RolloutError"),
}
# Calls that are shown and make no exception of ours.
MAKERS = {
    *("BadParameter", "Check", "ClickException", "RequestError", "TaskError", "UsageError"),
    "error_frame",
}
# Which argument the message is, where that is not the first. The hint is the next one.
PLACES = {
    **dict.fromkeys(("DaemonError", "DaemonNotStarted", "EpisodeFailed", "ManifestError"), 1),
    **dict.fromkeys(("ApiRefused", "RequestError", "TaskError"), 1),
}
HINTLESS = {
    *("BadParameter", "ClickException", "EpisodeFailed", "SessionEnded", "SessionError"),
    *("UsageError", "ValueError", "error_frame", "fail"),
}
# A `ValueError` of these files is what validation tells a user.
VALIDATING = (
    *("cli/options.py", "environments/spec.py", "operations/", "rollouts/stages/named_stages.py"),
    *("server/settings.py", "system/request_origin.py"),
    *(f"environments/engines/{name}_options.py" for name in ("docker", "kubernetes", "swarm")),
)
PYTEST_PLUGIN = "sdk/pytest_plugin.py"  # it fails a test with what its user sees
# Classes whose methods return what is shown.
RETURNING = {"processes/exits/exit_reason.py": "ExitReason"}
# Exceptions that nobody sees: they are caught, and become another or none.
UNSEEN = {
    "ClientGone": "its connection is closed",
    "ClientLeft": "there is nobody to answer",
    "Detached": "the command says how to attach again",
    "ExecutorError": "a base class",
    "FrameError": "the connection is closed with what it says, or the process is replaced",
    "InvalidTransition": "the outcome came twice, and the first one stands",
    "NoRoom": "the request waits",
    "RpcFailed": "becomes an error of JSON-RPC, whose codes the protocol defines",
    "SessionFailed": "`openenv test` tells what it says as a finding",
    "ShimGone": "the replica's exit is told instead",
    "TaskCancelled": "the request is cancelled",
    "UvFailed": "becomes PreparationFailed",
    "WireError": "its connection is closed",
    "_Missing": "`openenv check` prints what an engine's agent has found",
    "_Stopped": "ends a thread of the SDK's",
}
HINTS = ("default_hint", "hint")  # of a class
MOST_WAYS = 12  # of one text with alternatives within
MOST_NAMES = 4  # that lead from one to the next

Texts = list[str]


@dataclass(frozen=True, slots=True)
class Message:
    """One place where the product says that something failed."""

    name: str  # of the class, or of what else is called
    file: str
    line: int
    texts: tuple[str, ...]  # empty: what it says is not known before
    hints: tuple[str, ...] = ()


@dataclass(slots=True)
class Module:
    """One file's tree, and where the names that it imports come from."""

    file: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an expression stands, for the names in it."""

    module: Module
    scope: ast.AST  # the function around it, or the module
    node: ast.expr | ast.ClassDef


class Catalog:
    """The product's error classes and messages."""

    def __init__(self) -> None:
        files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
        read = (_module(path) for path in files)
        self._modules = {module.file: module for module in read}

    @cached_property
    def classes(self) -> dict[str, set[str]]:
        """The names of all classes, each with those of its bases, however far up."""
        bases: dict[str, set[str]] = {}
        for _, node in self._class_nodes:
            bases.setdefault(node.name, set()).update(_name(base) for base in node.bases)
        found: dict[str, set[str]] = {}
        for name in bases:
            todo = [*bases[name]]
            found[name] = set()
            while todo:
                base = todo.pop()
                if base not in found[name]:
                    found[name].add(base)
                    todo += bases.get(base, ())
        return found

    @cached_property
    def exceptions(self) -> set[str]:
        """The names of all exceptions that the product defines."""
        roots = {"Exception", "BaseException", "ConnectionError", "OSError", "ValueError"}
        return {name for name, bases in self.classes.items() if bases & roots}

    @cached_property
    def shown(self) -> set[str]:
        """The names of exceptions that somebody sees."""
        found = {n for n in self.exceptions if n in SHOWN or self.classes[n] & SHOWN}
        return found - set(UNSEEN)

    @cached_property
    def messages(self) -> list[Message]:
        """All messages, in the order of the files."""
        return [found for module in self._modules.values() for found in self._of_module(module)]

    @cached_property
    def _class_nodes(self) -> list[tuple[Module, ast.ClassDef]]:
        """The definitions of all classes, and where they are."""
        modules = self._modules.values()
        found = ((module, node) for module in modules for node in ast.walk(module.tree))
        return [(module, node) for module, node in found if isinstance(node, ast.ClassDef)]

    def _of_module(self, module: Module) -> Iterator[Message]:
        for scope, owner, node in _calls(module.tree):
            if isinstance(node, ast.Return):
                if RETURNING.get(module.file) == owner and node.value is not None:
                    texts = self._texts(node.value, Place(module, scope, node.value))
                    yield Message(owner, module.file, node.lineno, _told(texts))
                continue
            name = _name(node.func)
            if _is_super(node) and owner in self.shown:
                name = owner
            if name == owner and not _is_super(node):
                continue
            if name in self.shown or name in MAKERS or _is_told_by(module.file, name):
                yield self._message(name, node, module, scope)

    def _message(self, name: str, node: ast.Call, module: Module, scope: ast.AST) -> Message:
        given = {each.arg: each.value for each in node.keywords}
        place = 0 if _is_super(node) else PLACES.get(name, 0)
        message: ast.expr | None = dict(enumerate(node.args)).get(place, given.get("message"))
        hint: ast.expr | None = dict(enumerate(node.args)).get(place + 1, given.get("hint"))
        if name == "Check":
            message, hint = given.get("problem"), given.get("remedy")
        if name == "ApiRefused":
            found = _of_dictionary(message, scope)  # Kubernetes' error of this name has a text
            message, hint = found or (node.args[0] if node.args else None, hint)
        here = Place(module, scope, node)
        hints = self.hint_of_class(name) if hint is None else self._texts(hint, here)
        hints = [] if name in HINTLESS else hints
        texts = [] if message is None else self._texts(message, here)
        return Message(name, module.file, node.lineno, _told(texts), _told(hints))

    def hint_of_class(self, name: str) -> Texts:
        """Return the hint that a class, or the nearest of its bases, has for all its errors."""
        for module, node in self._class_nodes:
            if node.name == name:
                for each in node.body:
                    if isinstance(each, ast.Assign) and _name(each.targets[0]) in HINTS:
                        return self._texts(each.value, Place(module, module.tree, node))
        return []

    def _texts(self, node: ast.expr, at: Place, depth: int = 0) -> Texts:
        """Return what a text may be; `…` stands for what only a run knows."""
        match node:
            case ast.Constant(value=None):
                return []
            case ast.Constant(value=value):
                return [str(value)]
            case ast.JoinedStr(values=values):
                return _joined([self._part(each, at, depth) for each in values])
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return _joined([self._texts(each, at, depth) for each in (left, right)])
            case ast.IfExp(body=first, orelse=second) | ast.BoolOp(values=[first, second]):
                return [*self._texts(first, at, depth), *self._texts(second, at, depth)]
            case ast.Name(id=name) if depth < MOST_NAMES:
                return self._named(name, at, depth + 1)
            case ast.Call(func=ast.Name(id="with_last_lines"), args=[text, *_]):
                return self._texts(text, at, depth)
            case ast.Call(func=called) if depth < MOST_NAMES:
                return self._returned(called, at, depth + 1) or ["…"]
        return ["…"]

    def _returned(self, called: ast.expr, at: Place, depth: int) -> Texts:
        """Return what a function of a module of ours returns, if that is one text."""
        file, name = at.module.file, _name(called)
        if isinstance(called, ast.Attribute):
            package, module = at.module.imported.get(_name(called.value), ("nowhere", ""))
            file = str(Path(package).with_name(f"{module}.py"))
        elif name in at.module.imported:
            file, name = at.module.imported[name]
        if (other := self._modules.get(file)) is None or name not in other.functions:
            return []
        function = other.functions[name]
        returned = [each for each in ast.walk(function) if isinstance(each, ast.Return)]
        if len(returned) != 1 or returned[0].value is None:
            return []
        return self._texts(returned[0].value, Place(other, function, returned[0].value), depth)

    def _part(self, node: ast.expr, at: Place, depth: int) -> Texts:
        """Return what a piece of an f-string may be: its text, or a word for what is filled in."""
        if not isinstance(node, ast.FormattedValue):
            return self._texts(node, at, depth)
        found = self._texts(node.value, at, depth)
        word = _last_word(node.value).strip("_").upper() or "…"
        word = repr(word) if node.conversion == ord("r") else word
        return [*dict.fromkeys(word if "…" in each else each for each in found)] or [word]

    def _named(self, name: str, at: Place, depth: int) -> Texts:
        if given := _assigned(name, at):
            texts = [self._texts(each, at, depth) for each in given]
            return [*dict.fromkeys(itertools.chain.from_iterable(texts))]
        file, original = at.module.imported.get(name, (at.module.file, name))
        other = self._modules.get(file)
        if other is None or original not in other.constants:
            return ["…"]
        return self._texts(other.constants[original], Place(other, other.tree, at.node), depth)


def _joined(parts: list[Texts]) -> Texts:
    ways = itertools.product(*parts)
    return ["".join(way) for way in itertools.islice(ways, MOST_WAYS)]


def _told(texts: Texts) -> tuple[str, ...]:
    """Return the texts that say something themselves, once each."""
    return tuple(dict.fromkeys(text for text in texts if re.search("[a-z]{2}", text)))


def _assigned(name: str, at: Place) -> list[ast.expr]:
    """Return what a name was given before a node of a function: the last in a block around it."""
    found: list[ast.expr] = []
    if isinstance(at.scope, ast.Module):
        return found
    for block in ast.walk(at.scope):
        for body in (getattr(block, "body", None), getattr(block, "orelse", None)):
            if not isinstance(body, list):
                continue
            given = [each for each in body if _gives(each, name) and each.lineno < at.node.lineno]
            if given and body[-1].end_lineno >= at.node.lineno >= body[0].lineno:
                found = [value for value in [_given(given[-1], name)] if value]
            elif given and len(found) != 1:
                found += [value for value in [_given(given[-1], name)] if value]
    return found


def _gives(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and _given(node, name) is not None


def _given(node: ast.Assign, name: str) -> ast.expr | None:
    """Return what an assignment gives a name, alone or as one of several."""
    for target in node.targets:
        if _name(target) == name:
            return node.value
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for each, value in zip(target.elts, node.value.elts, strict=False):
                if _name(each) == name:
                    return value
    return None


def _of_dictionary(
    node: ast.expr | None, scope: ast.AST
) -> tuple[ast.expr, ast.expr | None] | None:
    """Return the message and the hint of an error that is made as JSON."""
    dictionaries = [node, *(each.value for each in ast.walk(scope) if isinstance(each, ast.Assign))]
    for each in dictionaries:
        if isinstance(each, ast.Dict):
            given = {
                getattr(k, "value", None): v for k, v in zip(each.keys, each.values, strict=True)
            }
            if "message" in given:
                return given["message"], given.get("hint")
    return None


def _module(path: Path) -> Module:
    found = Module(str(path.relative_to(ROOT)), ast.parse(path.read_text()))
    for node in found.tree.body:
        if isinstance(node, ast.Assign):
            found.constants |= {_name(target): node.value for target in node.targets}
        elif isinstance(node, ast.FunctionDef):
            found.functions[node.name] = node
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            found.constants[_name(node.target)] = node.value
        elif isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
            file = folder.with_suffix(".py") if node.module else folder / "__init__.py"
            file = file if file.exists() else folder / "__init__.py"
            if file.is_relative_to(ROOT):
                at = str(file.relative_to(ROOT))
                found.imported |= {a.asname or a.name: (at, a.name) for a in node.names}
    return found


def _calls(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.Call | ast.Return]]:
    """Yield calls and returns, each with its function and the name of the class around it."""
    todo: list[tuple[ast.AST, ast.AST, str]] = [(tree, tree, "")]
    while todo:
        node, scope, owner = todo.pop()
        if isinstance(node, ast.Call | ast.Return):
            yield scope, owner, node
        if isinstance(node, ast.ClassDef):
            owner = node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope = node
        todo += [(each, scope, owner) for each in reversed([*ast.iter_child_nodes(node)])]


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty where there is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def _last_word(node: ast.expr) -> str:
    """Return the name of what is filled in: of a value, or of what a function is given."""
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return _name(node)


def _is_super(node: ast.Call) -> bool:
    return _name(node.func) == "__init__" and isinstance(node.func, ast.Attribute)


def _is_told_by(file: str, name: str) -> bool:
    """Whether a call that is shown in certain files alone is shown in this one."""
    if name == "fail":
        return file == PYTEST_PLUGIN
    return name == "ValueError" and file.startswith(VALIDATING)
