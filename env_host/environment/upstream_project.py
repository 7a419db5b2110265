# SPDX-License-Identifier: Apache-2.0
"""An upstream project, as it is: import its app, and learn from it what it serves.

A project calls upstream's `create_app(factory, ActionClass, …)` at import. All ways of doing so
end in `HTTPEnvServer`, whose arguments are noted while the project is imported. Its check that a
class is marked for several sessions is skipped: `plan.py` decides how many sessions there are, and
the project's number is only a request.

The project's own ASGI middleware is found in its app, so that it also runs around our routes;
`serving/own_app.py` calls it at a handshake. A project without it pays nothing.

    the app's middleware ─▶ `SessionRoute`, where upstream's route was ─┬─▶ what the scope names
                                                                         └─▶ upstream's
"""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...schema.protocol import HostConfig
from ...system.net.http_limits import Message, Receive, Send
from ..errors import LoadError
from ..startup import replaced
from . import deferred_imports
from .definition import AnyAction, Definition, is_absent
from .interfaces import Observation, State
from .source_analysis import file_below

UPSTREAM_SERVER = "openenv.core.env_server.http_server"
OUR_PATHS = frozenset({"/ws", "/mcp", "/capacity", "/metrics"})
GAUGES = frozenset({"/capacity", "/metrics"})  # read outside of the project's app
# Libraries whose routes keep nothing in the process: each request makes an environment.
_LIBRARIES = frozenset({"openenv", "fastapi", "starlette", "gradio"})
_STATELESS = (UPSTREAM_SERVER, "openenv.core.env_server.route_config", "fastapi.applications")

log = logging.getLogger("openenvd.env_host")


def import_app(config: HostConfig, note: Callable[[str], None]) -> Any:
    """Import the app: the first candidate that imports; if none exists, the first fallback.

    A fallback is noted, because the manifest names the app wrongly. Raises `LoadError` if none
    imports. Its cause is the failure of a candidate that exists, rather than of one that is
    missing.
    """
    failures: dict[str, BaseException] = {}
    for candidate in _candidates(config, failures):
        try:
            app = _import_attribute(candidate, config.import_paths)
        except (Exception, SystemExit) as exc:  # some packages exit where there is no GPU
            failures[candidate] = exc
            continue
        if not _is_asgi(app):
            raise LoadError(_no_asgi(candidate, app))
        if failures and candidate in config.app_fallbacks:
            note(f"{_misnamed(config, failures)}; serving {candidate} instead")
        return app
    cause = next((e for e in failures.values() if not is_absent(e, _modules(failures))), None)
    module = getattr(getattr(cause, "obj", None), "__name__", "")
    lacks_app = isinstance(cause, AttributeError) and f"{module}:{cause.name}" in failures
    if cause is None or lacks_app:  # what is named is not in its module
        raise LoadError(f"{_misnamed(config, failures)}; tried {', '.join(failures)}")
    raise LoadError(f"{type(cause).__name__}: {cause}") from cause


def _is_asgi(app: Any) -> bool:
    """Return whether an app can be called as ASGI's are: `await app(scope, receive, send)`."""
    # A router of FastAPI's only answers inside a FastAPI app.
    if inspect.isclass(app) or "APIRouter" in (each.__name__ for each in type(app).__mro__):
        return False
    call = app if inspect.isroutine(app) else getattr(app, "__call__", None)  # noqa: B004
    try:
        signature = inspect.signature(app)
        signature.bind(None, None, None)
    except ValueError:  # compiled, and does not say how
        return callable(app)
    except TypeError:
        return False
    parameters = signature.parameters.values()
    fixed = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
    return inspect.iscoroutinefunction(call) or len(fixed) >= 3


def _no_asgi(candidate: str, app: Any) -> str:
    what = "a class" if inspect.isclass(app) else f"of the type {type(app).__qualname__}"
    return (
        f"{candidate} is {what}, and no ASGI application, so it can answer no request; name an "
        "ASGI app in openenv.yaml: a FastAPI app that includes the router, or the WSGI app in "
        "asgiref.wsgi.WsgiToAsgi"
    )


def has_session_route(app: Any) -> bool:
    """Return whether an app that is not upstream's shows a route of sessions; it may hide one."""
    return any(path == "/ws" for _, path in _all_routes(app))


def example_route(app: Any) -> str | None:
    """Return a route of an app without sessions to try: `POST /reset {}`; None: it shows none."""
    shown = [
        (method, path)
        for route, path in _all_routes(app)
        if getattr(route, "include_in_schema", True)
        for method in sorted(getattr(route, "methods", None) or ())
    ]
    posts = [f"POST {path} {{}}" for method, path in shown if method == "POST"]
    resets = [each for each in posts if each.endswith("/reset {}")]
    gets = [f"GET {path}" for method, path in shown if method == "GET"]
    health = [each for each in gets if each == "GET /health"]
    return next(iter([*resets, *health, *gets]), None)


def _all_routes(app: Any, prefix: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the routes of an app and of those mounted in it, each with its whole path."""
    while not hasattr(app, "routes") and hasattr(app, "app"):  # middleware
        app = app.app
    for route in getattr(app, "routes", None) or ():
        path = prefix + getattr(route, "path", "")
        yield route, path
        if hasattr(route, "app") and not getattr(route, "methods", None):  # mounted
            yield from _all_routes(route.app, path)


def _candidates(config: HostConfig, failures: Mapping[str, BaseException]) -> Iterator[str]:
    yield from config.app_candidates
    # An app that is there and fails must not be replaced by another.
    modules = _modules(config.app_candidates)
    if all(is_absent(exc, modules) for exc in failures.values()):
        yield from config.app_fallbacks


def _modules(candidates: Iterable[str]) -> list[str]:
    return [candidate.partition(":")[0] for candidate in candidates]


def _misnamed(config: HostConfig, failures: Mapping[str, BaseException]) -> str:
    place = "no app was found, and none is named"
    place = f"{config.app_place}: app" if config.app_place else place
    return f"{place}: {failures[config.app_candidates[-1]]}"


def load_project(config: HostConfig, note: Callable[[str], None]) -> tuple[Definition | None, Any]:
    """Return the definition of an upstream project, or its app when that is not upstream's.

    What a user should know of it is noted. Raises `LoadError` when the project does not import.
    """
    with _noted_servers() as servers:
        app = import_app(config, note)
    # Otherwise the app was wrapped, or mounted into another.
    last = servers[-1] if servers else None
    noted = next((each for each in reversed(servers) if each[1] is app), last)
    if noted is None:
        text = "the app of %s is not made by upstream's create_app; serving it unchanged"
        log.warning(text, config.name)
        return None, app
    definition = _definition(noted[0], noted[1], app, config.name)
    if definition.middleware is None:
        return definition, None
    if sentence := definition.middleware.sentence:
        note(sentence)
    return (definition, None) if definition.middleware.is_reachable else (None, app)


def _definition(server: Any, registered: Any, app: Any, name: str) -> Definition:
    concurrency = getattr(server, "_concurrency_config", None)
    own_paths = frozenset(p for p in OUR_PATHS if _serves_itself(app, p))
    routes = list(getattr(app, "routes", ()))
    # Paths that upstream alone answers; the project may have put routes before them.
    modules = [getattr(getattr(r, "endpoint", None), "__module__", None) for r in routes]
    upstreams = routes[: next((i for i, m in enumerate(modules) if m not in _STATELESS), None)]
    rest = {getattr(route, "path", None) for route in routes[len(upstreams) :]}
    shared_paths = frozenset(route.path for route in upstreams) - rest | (OUR_PATHS - own_paths)
    endpoints = (getattr(r, "endpoint", None) or getattr(r, "app", None) for r in routes)
    middleware = own_middleware(app, registered)
    if middleware is not None:  # which may keep something in its process, too
        shared_paths &= GAUGES
    observation_cls = server.observation_cls or Observation
    return Definition(
        name=getattr(server, "env_name", None) or name,
        factory=server._env_factory,  # noqa: SLF001  the only place where upstream keeps it
        action_cls=server.action_cls or AnyAction,  # a project of tools alone may name none
        observation_cls=observation_cls,
        reset_observation_cls=getattr(server, "reset_observation_cls", None) or observation_cls,
        state_cls=getattr(server, "state_cls", State),
        session_timeout_seconds=getattr(concurrency, "session_timeout", None),
        app=app,
        upstreams_server=server,
        own_paths=own_paths,
        shared_paths=shared_paths,
        has_own_hooks=_has_own_hooks(app) or _has_own_hooks(registered),
        # A mounted app answers its own.
        has_own_routes=any(each and not _is_librarys(each) for each in endpoints),
        middleware=middleware,
        refuses_unknown_ids=hasattr(server, "_session_websocket_attachments"),
    )


def _serves_itself(app: Any, path: str) -> bool:
    """Return whether the project put a route of its own before upstream's."""
    for route in getattr(app, "routes", ()):
        if getattr(route, "path", None) == path:
            return not _is_upstreams(route)
    return False


def _is_upstreams(route: Any) -> bool:
    name: str = getattr(getattr(route, "endpoint", None), "__qualname__", "")
    return name.startswith("HTTPEnvServer.")


def _has_own_hooks(app: Any) -> bool:
    """Return whether start-up or shutdown calls anything that is not a library's own."""
    router = getattr(app, "router", None)
    hooks = [*getattr(router, "on_startup", ()), *getattr(router, "on_shutdown", ())]
    lifespan = getattr(router, "lifespan_context", None)
    try:
        return any(map(_is_the_projects, [*hooks, lifespan] if lifespan else hooks))
    except Exception:  # it cannot be looked into, so no library has made it
        return True


def _is_the_projects(hook: Any) -> bool:
    """Return whether a hook, or one that it wraps (as gradio's does), is not a library's."""
    if not _is_librarys(hook):
        return True
    wrapped = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
    return any(_is_the_projects(each) for each in wrapped.values() if callable(each))


def _is_librarys(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] in _LIBRARIES


@contextmanager
def _noted_servers() -> Iterator[list[tuple[Any, Any]]]:
    """Record every `HTTPEnvServer` with the app it registers its routes on."""
    noted: list[tuple[Any, Any]] = []
    deferred_imports.defer_mcp()
    try:
        server_class: Any = importlib.import_module(UPSTREAM_SERVER).HTTPEnvServer
    except ImportError:
        yield noted  # the project does not use it, or its own import fails
        return
    deferred_imports.give_gradio_when_asked()
    register = server_class.register_routes

    def note(self: Any, app: Any, *args: Any, **kwargs: Any) -> Any:
        noted.append((self, app))
        return register(self, app, *args, **kwargs)

    server_class._validate_concurrency_safety = lambda self: None  # noqa: SLF001
    with replaced(server_class, "register_routes", note):
        yield noted


def _import_attribute(candidate: str, folders: Sequence[str]) -> Any:
    module_name, _, attribute = candidate.partition(":")
    before = set(sys.modules)
    try:
        module = importlib.import_module(module_name)
        app = operator.attrgetter(attribute.removesuffix("()") or "app")(module)
        return app() if attribute.endswith("()") else app
    except (Exception, SystemExit):
        new = set(sys.modules) - before
        own = {name.partition(".")[0] for name in new if file_below(folders, sys.modules[name])}
        for name in new:  # the next candidate imports the project's modules afresh
            if name.partition(".")[0] in own:
                del sys.modules[name]
        raise


# The key in a request's scope of the function that answers the request.
ANSWER = "openenvd.answer"
SESSION_PATHS = frozenset({"/ws", "/mcp"})
# Starlette's middleware that passes handshakes on unread.
_HTTP_ONLY = frozenset(f"starlette.middleware.{name}" for name in ("base", "cors", "gzip"))

Answer = Callable[[Message, Receive, Send], Awaitable[None]]


class SessionRoute:
    """Stands in the app where upstream's route of sessions stood."""

    def __init__(self, upstreams: Answer) -> None:
        self._upstreams = upstreams

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a call on to what the scope names; otherwise to upstream."""
        answer: Answer = scope.get("extensions", {}).get(ANSWER, self._upstreams)
        await answer(scope, receive, send)


def answered_by(answer: Answer, scope: Message) -> Message:
    """Return a scope with which `SessionRoute` calls `answer`."""
    return {**scope, "extensions": {**scope.get("extensions", {}), ANSWER: answer}}


@dataclass(frozen=True, slots=True)
class OwnMiddleware:
    """The middleware of one project."""

    names: tuple[str, ...]
    sees_handshakes: bool
    is_reachable: bool  # it can be run around what is ours

    @property
    def sentence(self) -> str:
        """Return what a user should know of it; empty: nothing."""
        what = f"the middleware of this project ({', '.join(self.names)})"
        if not self.is_reachable:
            why = "cannot be run around sessions: its app is served as it is, by one process"
            return f"{what} {why}"
        how = "is asked at the handshake of each session; it does not see the session's messages"
        return f"{what} {how}" if self.sees_handshakes else ""


def own_middleware(app: Any, upstreams: Any) -> OwnMiddleware | None:
    """Find the middleware in front of `upstreams`, the app that upstream made; None: there is none.

    Upstream's routes of sessions are replaced by `SessionRoute`.
    """
    apps = [app] if app is upstreams else [app, upstreams]
    found = [each.cls for one in apps for each in getattr(one, "user_middleware", ())]
    if not hasattr(app, "routes"):  # it wraps what upstream made
        found.append(type(app))
    if not found:
        return None
    routes = [
        route
        for route in getattr(upstreams, "routes", ())
        if getattr(route, "path", None) in SESSION_PATHS and _is_upstreams(route)
    ]
    for route in routes:
        route.app = SessionRoute(route.app)
    calls = [each.__call__ if isinstance(each, type) else each for each in found]
    return OwnMiddleware(
        names=tuple(getattr(each, "__name__", str(each)) for each in found),
        sees_handshakes=any(getattr(c, "__module__", None) not in _HTTP_ONLY for c in calls),
        is_reachable=bool(routes),
    )
