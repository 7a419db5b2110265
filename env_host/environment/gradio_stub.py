# SPDX-License-Identifier: Apache-2.0
"""Keeps gradio out of an environment whose web interface is off.

Upstream's server imports it even then: more than 3 s and 75 MB. It does so under
`except ModuleNotFoundError`, so pretending that it is not installed is enough, and only while
upstream's package is imported. All other code that imports gradio gets it, as does code that asks
upstream's package for what it has of gradio later.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

WEB_INTERFACE_VARIABLE = "ENABLE_WEB_INTERFACE"  # upstream's
UPSTREAM_PACKAGE = "openenv.core.env_server"
_OF_GRADIO = ("create_web_interface_app", "WebInterfaceManager")  # None without it
_ON = ("true", "1", "yes")


class _Absent:
    """A finder for which gradio does not exist while upstream's package is imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "gradio" and _imports_upstream(sys._getframe()):  # noqa: SLF001
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def _imports_upstream(frame: FrameType | None) -> bool:
    """Tell whether a frame is below the one that executes upstream's package."""
    while frame is not None:
        is_module = frame.f_code.co_name == "<module>"
        if is_module and frame.f_globals.get("__name__") == UPSTREAM_PACKAGE:
            return True
        frame = frame.f_back
    return False


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the web interface, which is made of gradio, is on."""
    environ = os.environ if environ is None else environ
    return environ.get(WEB_INTERFACE_VARIABLE, "").lower() in _ON


def keep_out() -> None:
    """Make upstream's package go without gradio from now on."""
    if _Absent not in sys.meta_path:
        sys.meta_path.insert(0, _Absent)


def give_when_asked() -> None:
    """Make upstream's package, imported without gradio, import what it has of it when asked."""
    package = sys.modules.get(UPSTREAM_PACKAGE)
    if package is None or _Absent not in sys.meta_path:
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
