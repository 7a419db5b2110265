# SPDX-License-Identifier: Apache-2.0
"""`Definition`: the environment that is served, and how it is made from a bare class.

`upstream_project.py` makes one from an upstream project's own `create_app` call,
`definition_of_class` from `module:Class`. Everything else is written against this one value.

`class_made_by` finds which class a factory makes instances of without calling it: a call may fail,
or take half a minute (`plan.py`). Nearly every factory of upstream's projects is a function that
ends in `return TheEnvironment(…)`, and its source says so.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict
from pydantic_core import SchemaValidator

from ..errors import LoadError
from . import interfaces, source_analysis
from .instances import may_use_loop
from .own_middleware import OwnMiddleware
from .upstream_types import McpTypes, ObservationForm, installed_form, upstream_mcp_types

_BUNDLED = f"{__package__.rpartition('.')[0]}.bundled."
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class AnyAction(BaseModel):
    """The action type of a class that names none: any JSON object."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True)
class Definition:
    """One environment as the env host serves it."""

    name: str
    factory: Callable[[], Any]
    action_cls: type[BaseModel]
    observation_cls: type[BaseModel]
    state_cls: type[BaseModel]
    reset_observation_cls: type[BaseModel]
    session_timeout_seconds: float | None = None  # the project's own idle time-out
    app: Any = None  # the project's ASGI app, for every route that is not ours
    own_paths: frozenset[str] = frozenset()  # of ours, those that the project serves differently
    shared_paths: frozenset[str] = frozenset()  # of the app, those that any process can answer
    middleware: OwnMiddleware | None = None  # of the project
    has_own_hooks: bool = False  # the project has start-up or shutdown hooks
    has_own_routes: bool = False  # and routes that are no library's
    mcp: McpTypes | None = field(default_factory=upstream_mcp_types)
    observation_form: ObservationForm = field(default_factory=installed_form)
    refuses_unknown_ids: bool = True  # of `/ws?session_id=`; upstream before 0.5.0 ignores them
    _validate: Callable[[Any], Any] = field(init=False)  # what the action's `model_validate` does

    def __post_init__(self) -> None:
        """Find how actions are validated: by the class's own method, or without its wrapper."""
        action_cls = self.action_cls
        own: Any = action_cls.model_validate
        is_plain = own.__func__ is BaseModel.model_validate.__func__  # type: ignore[attr-defined]
        validate = _validator_of(action_cls) if is_plain else own
        object.__setattr__(self, "_validate", validate)

    @property
    def env_class(self) -> type | None:
        """The environment's class, where it is known without creating one."""
        factory: Any = self.factory
        while hasattr(factory, "func"):  # a partial, or a factory of shared-state proxies
            factory = factory.func
        return factory if inspect.isclass(factory) else None

    @property
    def made_class(self) -> type | None:
        """The class of the factory's environments, where its code says which."""
        return self.env_class or class_made_by(self.factory)

    @property
    def factory_name(self) -> str:
        """The factory's name, for errors."""
        return getattr(self.factory, "__name__", str(self.factory))

    @property
    def shares_one_thread(self) -> bool:
        """Return whether all sessions must run on the same thread."""
        return bool(getattr(self.made_class, "REQUIRES_SINGLE_THREAD_EXECUTOR", False))

    @property
    def may_change_threads(self) -> bool:
        """Return whether each call of an environment may run on another thread, for all we know."""
        if self.shares_one_thread:
            return False
        if getattr(self.made_class, "THREAD_SAFE", False):
            return True
        factory = self.factory  # one that is no class may hand out what is bound to a thread
        return inspect.isclass(factory) and not source_analysis.is_bound_to_thread(factory)

    @property
    def runs_on_loop(self) -> bool:
        """Return whether code of the project runs on the event loop, for all we know."""
        if self.has_own_hooks or self.middleware is not None or self.has_own_routes:
            return True
        env_class = self.made_class
        if env_class is None or not is_bundled(env_class):
            return env_class is None or may_use_loop(env_class)
        return False

    def is_own(self, path: str) -> bool:
        """Return whether requests for a path must be answered by the home shard."""
        return self.app is not None and path not in self.shared_paths

    @property
    def checks_handshakes(self) -> bool:
        """Return whether the project's middleware is asked before a session begins."""
        return self.middleware is not None and self.middleware.sees_handshakes

    def parse_action(self, data: dict[str, Any]) -> Any:
        """Parse the action in `data`; raises `pydantic.ValidationError` if it is invalid."""
        if "type" in data and self.mcp is not None:
            tool = with_parsed_arguments(data)
            if special := self.mcp.action_type(tool, self.action_cls):
                return special.model_validate(tool)
        if "tokens" in data or "action_id" in data:
            data = with_upstream_conversions(data)
        return self._validate(data)

    def schemas(self) -> dict[str, Any]:
        """Return the JSON schemas that `/schema` answers."""
        return {
            "action": self.action_cls.model_json_schema(),
            "observation": self.observation_cls.model_json_schema(),
            "state": self.state_cls.model_json_schema(),
            "reset_observation": self.reset_observation_cls.model_json_schema(),
        }


def is_bundled(env_class: type) -> bool:
    """Return whether an environment is one of ours."""
    return env_class.__module__.startswith(_BUNDLED)


def _validator_of(model: type[BaseModel]) -> Callable[[Any], Any]:
    validator = model.__pydantic_validator__
    if isinstance(validator, SchemaValidator):
        return validator.validate_python
    return model.model_validate  # its fields name types that do not exist yet


def definition_of_class(reference: str, name: str, folders: Sequence[str] = ()) -> Definition:
    """Import `module:Class` and make a definition of it; `folders` are for the error message.

    Raises:
        LoadError: the class does not import, or is no environment.
    """
    env_class = _import_class(reference, folders)
    action, observation, state = _types_of(env_class)
    return Definition(
        name=name,
        factory=env_class,
        action_cls=action,
        observation_cls=observation,
        reset_observation_cls=getattr(env_class, "reset_observation_cls", observation),
        state_cls=state,
    )


def with_parsed_arguments(data: dict[str, Any]) -> dict[str, Any]:
    """Parse a tool's arguments if they are JSON text, as the web interface sends them."""
    arguments = data.get("arguments")
    if data.get("type") != "call_tool" or not isinstance(arguments, str):
        return data
    try:
        return {**data, "arguments": json.loads(arguments)}
    except ValueError:
        return data


def with_upstream_conversions(data: dict[str, Any]) -> dict[str, Any]:
    """Convert two fields as upstream does, whatever the action's type.

    `tokens` becomes a tensor where torch is installed, `action_id` a number where it is one
    (source: upstream 0.10.0, `core/env_server/serialization.py`, `deserialize_action`).
    """
    converted = dict(data)
    if isinstance(tokens := data.get("tokens"), (list, str)):
        converted["tokens"] = _tensor(tokens)
    if isinstance(number := data.get("action_id"), str):
        with suppress(ValueError):
            converted["action_id"] = int(number)
    return converted


def _tensor(values: list[Any] | str) -> Any:
    """Convert a list, or JSON of one; what is no JSON becomes an empty list."""
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError:
            values = []
    try:
        torch: Any = importlib.import_module("torch") if isinstance(values, list) else None
    except ImportError:
        torch = None
    return values if torch is None else torch.tensor(values, dtype=torch.long)


def _or(name: str, module: object) -> str:
    """Ask for a class of the module that is called nearly so; nothing when none is."""
    from difflib import get_close_matches  # when a name is wrong

    near = get_close_matches(name, [k for k, v in vars(module).items() if inspect.isclass(v)], 1)
    return f"; did you mean {near[0]}?" if near else ""


def _import_class(reference: str, folders: Sequence[str]) -> type:
    module_name, _, class_name = reference.partition(":")
    if not module_name or not class_name:
        raise LoadError(f"{reference!r} is not of the form module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        if _is_absent(module_name, exc):
            where = f" in {', '.join(folders)}" if folders else ""
            raise LoadError(f"No module named {module_name!r}{where}") from None
        raise LoadError(f"{type(exc).__name__}: {exc}") from exc
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise LoadError(f"module {module_name} has no class {class_name}{_or(class_name, module)}")
    missing = [item for item in ("reset", "step") if not callable(getattr(found, item, None))]
    if missing:
        raise LoadError(f"{reference} is no environment: it has no {' and no '.join(missing)}")
    return found


def _is_absent(module_name: str, exc: Exception) -> bool:
    """Return whether this module is missing, and not one that it imports."""
    missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def _types_of(env_class: type) -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    """Find action, observation and state: by attribute, by type argument, or by annotation."""
    generic = next(_type_arguments(env_class), (None, None, None))
    hints = _hints_of(env_class)
    rest = (AnyAction, interfaces.Observation, interfaces.State)
    names = ("action_cls", "observation_cls", "state_cls")
    found: list[Any] = []
    for name, argument, hint, default in zip(names, generic, hints, rest, strict=True):
        candidates = (getattr(env_class, name, None), argument, hint, default)
        models = (each for each in candidates if inspect.isclass(each))
        found.append(next(each for each in models if issubclass(each, BaseModel)))
    return found[0], found[1], found[2]


def _type_arguments(env_class: type) -> Iterator[tuple[Any, Any, Any]]:
    for owner in env_class.__mro__:
        for base in getattr(owner, "__orig_bases__", ()):
            arguments = get_args(base)
            if getattr(get_origin(base), "__name__", "") == "Environment" and len(arguments) == 3:
                yield arguments


def _hints_of(env_class: Any) -> tuple[Any, Any, Any]:
    state = inspect.getattr_static(env_class, "state", None)
    step = _annotations(env_class.step)
    parameters = list(inspect.signature(env_class.step).parameters)
    action = step.get(parameters[1]) if len(parameters) > 1 else None
    getter = state.fget if isinstance(state, property) else None
    return action, step.get("return"), _annotations(getter).get("return")


def _annotations(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except Exception:  # unresolvable names: the class is served without its types
        return {}


def class_made_by(factory: Callable[[], Any]) -> type | None:
    """Return the class that each `return` of the function calls; None if it is not known."""
    if not inspect.isfunction(factory):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(factory)))
        known = inspect.getclosurevars(factory)
        scope = {**known.globals, **known.nonlocals}
        made = [_called(value, scope) for value in _returned(tree, factory.__name__)]
    except Exception:  # no source, a part of a line, or names that answer with an error
        return None
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
