# SPDX-License-Identifier: Apache-2.0
"""Defers imports in upstream's server that only a few projects need, until they are used.

gradio (3 s, 75 MB), where the web interface is off: upstream can do without it (it catches
`ModuleNotFoundError`), so gradio is hidden while upstream's package is imported. All other code can
import gradio. So can code that later accesses the names in upstream's package that depend on it.

fastmcp and mcp (0.7 s, 45 MB), for the one class `MCPEnvironment`: its module is executed with
stand-ins for the classes that it takes from there. Calling one, asking for an attribute or for its
instances imports the real one. A project that imports fastmcp itself gets the real one at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from .instances import UPSTREAM_MCP_ENVIRONMENT

WEB_INTERFACE_VARIABLE = "ENABLE_WEB_INTERFACE"  # upstream's
UPSTREAM_PACKAGE = "openenv.core.env_server"
_OF_GRADIO = ("create_web_interface_app", "WebInterfaceManager")  # None without it
_ON = ("true", "1", "yes")
_MCP_PACKAGES = ("fastmcp", "mcp")
_MCP_MODULES = (*_MCP_PACKAGES, "fastmcp.client", "fastmcp.client.client", "mcp.types")


class _WithoutGradio:
    """A finder for which gradio does not exist while upstream's package is imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "gradio" and _imports_upstream(sys._getframe()):  # noqa: SLF001
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def _imports_upstream(frame: FrameType | None) -> bool:
    """Return whether a frame is below the one that executes upstream's package."""
    while frame is not None:
        is_module = frame.f_code.co_name == "<module>"
        if is_module and frame.f_globals.get("__name__") == UPSTREAM_PACKAGE:
            return True
        frame = frame.f_back
    return False


def keep_gradio_out() -> None:
    """Make gradio look absent to upstream's package, unless upstream's web interface is on."""
    is_wanted = os.environ.get(WEB_INTERFACE_VARIABLE, "").lower() in _ON
    if not is_wanted and _WithoutGradio not in sys.meta_path:
        sys.meta_path.insert(0, _WithoutGradio)


def give_gradio_when_asked() -> None:
    """If upstream's package was imported without gradio, import its gradio names on first use."""
    package = sys.modules.get(UPSTREAM_PACKAGE)
    if package is None or _WithoutGradio not in sys.meta_path:
        return
    names = [name for name in _OF_GRADIO if vars(package).get(name, package) is None]
    for name in names:
        delattr(package, name)

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {UPSTREAM_PACKAGE!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{UPSTREAM_PACKAGE}.web_interface"), name)
        except ModuleNotFoundError:
            return None

    vars(package)["__getattr__"] = find


class _Deferred(type):
    """The type of stand-ins for classes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _real(cls)(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_real(cls), name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _real(cls))


def _real(standin: type) -> Any:
    return getattr(importlib.import_module(standin.__module__), standin.__name__)


def _refuse(cls: type) -> None:
    raise TypeError(f"{cls.__name__} needs the real class at once")


class _StandIn(ModuleType):
    """A stand-in for a module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Deferred(name, (), {"__module__": self.__name__, "__init_subclass__": _refuse})


class _WithStandIns:
    """Finds upstream's module; it is then executed with the stand-ins in place."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != UPSTREAM_MCP_ENVIRONMENT:
            return None
        sys.meta_path.remove(_WithStandIns)
        spec = PathFinder.find_spec(name, path)
        try:
            is_installed = all(importlib.util.find_spec(package) for package in _MCP_PACKAGES)
        except (ImportError, ValueError):  # the project has put something else in its place
            is_installed = False
        if spec is not None and spec.loader is not None and is_installed:
            spec.loader.exec_module = _among_stand_ins(spec.loader.exec_module)  # type: ignore[assignment,method-assign]
        return spec


def _among_stand_ins(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        stand_ins = {name: _StandIn(name) for name in _MCP_MODULES if name not in sys.modules}
        sys.modules.update(stand_ins)
        try:
            execute(module)
            return
        except Exception:  # noqa: S110  another version may use the real classes at import
            pass
        finally:
            for name in stand_ins:
                sys.modules.pop(name, None)
        execute(module)

    return exec_module


def defer_mcp() -> None:
    """Defer the import of `fastmcp`, unless it has been imported already."""
    if not any(name in sys.modules for name in (*_MCP_PACKAGES, UPSTREAM_MCP_ENVIRONMENT)):
        sys.meta_path.insert(0, _WithStandIns)
