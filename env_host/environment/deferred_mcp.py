# SPDX-License-Identifier: Apache-2.0
"""Defers the import of fastmcp and mcp until upstream's `MCPEnvironment` uses them.

Upstream's server imports both (0.7 s, 45 MB) for that one class, whether or not the project has an
environment of its kind. Its module is executed with stand-ins for the classes that it takes from
there: calling one, asking for an attribute or for its instances imports the real one. A project
that imports fastmcp itself gets the real one at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .instances import UPSTREAM_MCP_ENVIRONMENT

_PACKAGES = ("fastmcp", "mcp")


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


class _Package(ModuleType):
    """A stand-in for a package and any module in it."""

    __path__: list[str] = []  # noqa: RUF012  what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Deferred(name, (), {"__module__": self.__name__, "__init_subclass__": _refuse})


class _Packages:
    """Finds and loads the stand-ins."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_ours = name.partition(".")[0] in _PACKAGES
        return ModuleSpec(name, _Packages, is_package=True) if is_ours else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """There is nothing in it."""


class _Upstream:
    """Finds upstream's module, and has it executed among the stand-ins."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != UPSTREAM_MCP_ENVIRONMENT:
            return None
        sys.meta_path.remove(_Upstream)
        spec = PathFinder.find_spec(name, path)
        try:
            is_installed = all(importlib.util.find_spec(package) for package in _PACKAGES)
        except (ImportError, ValueError):  # the project has put something else in its place
            is_installed = False
        if spec is not None and spec.loader is not None and is_installed:
            spec.loader.exec_module = _among_standins(spec.loader.exec_module)  # type: ignore[assignment,method-assign]
        return spec


def _among_standins(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        try:
            with _standins():
                execute(module)
        except Exception:  # another version does more with them at once
            execute(module)

    return exec_module


@contextmanager
def _standins() -> Iterator[None]:
    sys.meta_path.insert(0, _Packages)
    try:
        yield
    finally:
        sys.meta_path.remove(_Packages)
        for name in [n for n, module in sys.modules.items() if isinstance(module, _Package)]:
            del sys.modules[name]


def defer() -> None:
    """Defer the import from now on, unless it has happened already."""
    if not any(name in sys.modules for name in (*_PACKAGES, UPSTREAM_MCP_ENVIRONMENT)):
        sys.meta_path.insert(0, _Upstream)
