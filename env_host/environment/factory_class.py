# SPDX-License-Identifier: Apache-2.0
"""Which class a factory makes instances of, found without calling it.

A call may fail, or take half a minute (`factory_trial.py`). Nearly every factory of upstream's
projects is a function that ends in `return TheEnvironment(…)`, and its source says so.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def class_made_by(factory: Callable[[], Any]) -> type | None:
    """Return the class that each `return` of the function calls; None if it is not known."""
    if not inspect.isfunction(factory):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(factory)))
        known = inspect.getclosurevars(factory)
    except (OSError, SyntaxError, ValueError):  # no source, or a part of a line
        return None
    scope = {**known.globals, **known.nonlocals}
    made = [_called(value, scope) for value in _returned(tree, factory.__name__)]
    is_one = bool(made) and all(found is made[0] for found in made)
    return made[0] if is_one and inspect.isclass(made[0]) else None


def _returned(tree: ast.Module, name: str) -> Iterator[ast.expr | None]:
    """Yield what the function returns; there is one of its name in its source, or one lambda."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and name == "<lambda>":
            yield node.body
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            yield from _returns(node)


def _returns(scope: ast.AST) -> Iterator[ast.expr | None]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.Return):
            yield node.value
        elif not isinstance(node, _SCOPES):
            yield from _returns(node)


def _called(value: ast.expr | None, scope: dict[str, Any]) -> Any:
    """Return what the expression calls: a name, or an attribute of one."""
    return _value_of(value.func, scope) if isinstance(value, ast.Call) else None


def _value_of(node: ast.expr, scope: dict[str, Any]) -> Any:
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, scope), node.attr, None)
    return scope.get(node.id) if isinstance(node, ast.Name) else None
