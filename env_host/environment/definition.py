# SPDX-License-Identifier: Apache-2.0
"""`Definition`: the environment that is served, and how it is made from a bare class.

`upstream_project.py` makes one from an upstream project's own `create_app` call.

`class_made_by` finds the class of a factory's instances without calling the factory: a call may
fail, or take half a minute (`plan.py`). Nearly every factory of upstream's projects is a function
that ends in `return TheEnvironment(…)`, and its source says so.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict
from pydantic_core import SchemaValidator

from ...system.text.units import near_matches
from ..errors import LoadError
from . import interfaces, source_analysis
from .instances import may_use_loop
from .upstream_types import ObservationForm, action_type, installed_form, upstream_mcp_types

if TYPE_CHECKING:
    from .upstream_project import OwnMiddleware

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
    upstreams_server: Any = None  # which answers requests without a session
    own_paths: frozenset[str] = frozenset()  # of ours, those that the project serves differently
    shared_paths: frozenset[str] = frozenset()  # of the app, those that any process can answer
    middleware: OwnMiddleware | None = None  # of the project
    has_own_hooks: bool = False  # the project has start-up or shutdown hooks
    has_own_routes: bool = False  # and routes that are no library's
    mcp: Any = field(default_factory=upstream_mcp_types)
    observation_form: ObservationForm = field(default_factory=installed_form)
    refuses_unknown_ids: bool = True  # of `/ws?session_id=`; upstream before 0.5.0 ignores them
    _validate: Callable[[Any], Any] = field(init=False)  # what the action's `model_validate` does

    def __post_init__(self) -> None:
        """Find how actions are validated: by the class's own method, or without its wrapper."""
        action_cls = self.action_cls
        validate: Any = action_cls.model_validate
        if validate.__func__ is BaseModel.model_validate.__func__:  # type: ignore[attr-defined]
            validator = action_cls.__pydantic_validator__
            if isinstance(validator, SchemaValidator):  # else fields name types that do not exist
                validate = validator.validate_python
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
            if special := action_type(self.mcp, tool, self.action_cls):
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


def definition_of_class(reference: str, name: str, folders: Sequence[str] = ()) -> Definition:
    """Make a definition of `module:Class`. Raises `LoadError`, which names the `folders`."""
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
        values: Any = tokens
        if isinstance(tokens, str):  # JSON of a list; what is no JSON becomes an empty list
            values = []
            with suppress(ValueError):
                values = json.loads(tokens)
        with suppress(ImportError):
            if isinstance(values, list):
                torch: Any = importlib.import_module("torch")
                values = torch.tensor(values, dtype=torch.long)
        converted["tokens"] = values
    if isinstance(number := data.get("action_id"), str):
        with suppress(ValueError):
            converted["action_id"] = int(number)
    return converted


def _import_class(reference: str, folders: Sequence[str]) -> type:
    module_name, _, class_name = reference.partition(":")
    if not module_name or not class_name:
        raise LoadError(f"{reference!r} is not of the form module:Class")
    try:
        module = importlib.import_module(module_name)
    except LoadError:  # says all that there is to say
        raise
    except (Exception, SystemExit) as exc:
        if is_absent(exc, [module_name]):
            where = f" in {', '.join(folders)}" if folders else ""
            raise LoadError(f"No module named {module_name!r}{where}") from None
        raise LoadError(f"{type(exc).__name__}: {exc}") from exc
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if _is_environment(value)]
        otherwise = f"its environments: {', '.join(classes)}" if classes else "it has none"
        _, hint = near_matches(class_name, classes, otherwise)
        raise LoadError(f"module {module_name} has no class {class_name}; {hint}")
    missing = [item for item in ("reset", "step") if not callable(getattr(found, item, None))]
    if missing:
        raise LoadError(f"{reference} is no environment: it has no {' and no '.join(missing)}")
    return found


def _is_environment(value: Any) -> bool:
    return inspect.isclass(value) and hasattr(value, "step") and not inspect.isabstract(value)


def is_absent(exc: BaseException, modules: Iterable[str]) -> bool:
    """Return whether one of these modules is missing, and not a module that it imports."""
    missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
    return missing is not None and any(f"{each}.".startswith(f"{missing}.") for each in modules)


def _types_of(env_class: Any) -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    """Find action, observation and state: by attribute, by type argument, or by annotation."""
    generic: tuple[Any, ...] = (None, None, None)
    for base in [b for owner in env_class.__mro__ for b in getattr(owner, "__orig_bases__", ())]:
        is_environment = getattr(get_origin(base), "__name__", "") == "Environment"
        if is_environment and len(arguments := get_args(base)) == 3:
            generic = arguments
            break
    state = inspect.getattr_static(env_class, "state", None)
    getter = state.fget if isinstance(state, property) else None
    hints = _annotations(env_class.step)
    parameters = list(inspect.signature(env_class.step).parameters)
    action = hints.get(parameters[1]) if len(parameters) > 1 else None
    annotated = (action, hints.get("return"), _annotations(getter).get("return"))
    rest = (AnyAction, interfaces.Observation, interfaces.State)
    names = ("action_cls", "observation_cls", "state_cls")
    found: list[Any] = []
    for name, argument, hint, default in zip(names, generic, annotated, rest, strict=True):
        candidates = (getattr(env_class, name, None), argument, hint, default)
        models = (each for each in candidates if inspect.isclass(each))
        found.append(next(each for each in models if issubclass(each, BaseModel)))
    return found[0], found[1], found[2]


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
        returned = _returned(tree, factory.__name__)
        made = [_value_of(v.func, scope) if isinstance(v, ast.Call) else None for v in returned]
    except Exception:  # no source, a part of a line, or names that answer with an error
        return None
    is_one = bool(made) and all(found is made[0] for found in made)
    return made[0] if is_one and inspect.isclass(made[0]) else None


def _returned(tree: ast.Module, name: str) -> Iterator[ast.expr | None]:
    """Yield what the function returns; its source has one function of its name, or one lambda."""
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


def _value_of(node: ast.expr, scope: dict[str, Any]) -> Any:
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, scope), node.attr, None)
    return scope.get(node.id) if isinstance(node, ast.Name) else None
