# SPDX-License-Identifier: Apache-2.0
"""Keeps gradio out of an environment whose web interface is off.

Upstream's server imports it even then: more than 3 s and 75 MB. It does so under
`except ModuleNotFoundError`, so pretending that it is not installed is enough. A project that
imports gradio itself, unguarded, is started again with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

WEB_INTERFACE_VARIABLE = "ENABLE_WEB_INTERFACE"  # upstream's
ALLOW_VARIABLE = "OPENENVD_ALLOW_GRADIO"
_ON = ("true", "1", "yes")


class _Absent:
    """A finder for which gradio does not exist."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "gradio":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether gradio may be imported: the web interface is on, or the project needs it."""
    environ = os.environ if environ is None else environ
    web = environ.get(WEB_INTERFACE_VARIABLE, "").lower() in _ON
    return web or environ.get(ALLOW_VARIABLE) == "1"


def keep_out() -> None:
    """Make `import gradio` fail from now on."""
    if _Absent not in sys.meta_path:
        sys.meta_path.insert(0, _Absent)


def was_missed(exc: BaseException | None) -> bool:
    """Tell whether an import failed because gradio was kept out."""
    while exc is not None:
        if isinstance(exc, ModuleNotFoundError) and (exc.name or "").partition(".")[0] == "gradio":
            return _Absent in sys.meta_path
        exc = exc.__cause__ or exc.__context__
    return False
