# SPDX-License-Identifier: Apache-2.0
"""Virtual environments laid over another one, for a try with more packages: `launch --with`.

    venvs/<key>/    the further packages alone; those of the base, which stays as it is, are found
                    after them, through a `.pth` file (uv's own `run --with` does the same)

The key is made of the base and the packages. What both need keeps the version that the base has,
unless it is named.
"""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...env_host.protocol import HOST_LIBRARIES
from ...system.hidden_values import hide_credentials
from ..layout import Layout
from .project_venv import KEY_VERSION, make_once
from .uv import Say, Uv, UvFailed

PTH = "openenvd-base.pth"
_NAME = re.compile(r"[\w.-]+")


def overlay_python(
    base: Path | None, packages: Sequence[str], layout: Layout, folder: Path, say: Say
) -> Path:
    """Return the Python of an environment that has these packages, and all of the base's.

    Args:
        base: The interpreter of a project's environment; None: our own.
        packages: What to install, as uv takes it.
        layout: Where it is kept.
        folder: What relative paths among the packages refer to.
        say: Gets lines about what happens.

    Raises:
        PreparationFailed: uv failed; the message has its last lines.
    """
    python = base or Path(sys.executable)
    key = overlay_key(python, packages, folder)
    overlay = _Overlay(python, packages, layout.venvs / key, folder, say)
    note = {"base": str(python.parent.parent)}
    return make_once(layout.venvs / key, note, overlay.build, say)


def overlay_key(base: Path, packages: Sequence[str], folder: Path) -> str:
    """Return the key of the environment with these packages over that of the Python `base`."""
    parts = [str(KEY_VERSION), str(base), *sorted(packages)]
    if any("/" in package for package in packages):
        parts.append(str(folder))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


class _Overlay:
    """Makes one of them."""

    def __init__(
        self, base: Path, packages: Sequence[str], venv: Path, folder: Path, say: Say
    ) -> None:
        self._base = base
        self._packages = packages
        self._venv = venv
        self._say = say
        self._uv = Uv(folder, say)

    def build(self) -> None:
        named = hide_credentials(", ".join(self._packages))
        self._say(f"installing {named} beside the dependencies")
        try:
            self._uv.make_venv(str(self._base), self._venv)
            with tempfile.TemporaryDirectory(prefix="openenvd-") as scratch:
                constraints = Path(scratch, "constraints.txt")
                constraints.write_text("\n".join(self._constraints()))
                self._uv.install(self._venv, "-c", str(constraints), "--", *self._packages)
        except UvFailed as exc:
            message = f"{named} cannot be installed beside the dependencies"
            raise exc.explained(message, "look at --with") from exc
        packages = (
            sysconfig.get_path("purelib")
            if str(self._base) == sys.executable
            else _site_packages(self._base.parent.parent)
        )
        libraries = self._base.parent.parent / HOST_LIBRARIES
        if libraries.is_dir():  # else it is our own environment, which has them among its packages
            (self._venv / HOST_LIBRARIES).symlink_to(libraries)
        pth = _site_packages(self._venv) / PTH
        pth.write_text(f"import site; site.addsitedir({str(packages)!r})\n")

    def _constraints(self) -> list[str]:
        """What the base has, but for the packages that are named."""
        named = {_normal(package) for package in self._packages}
        lines = self._uv.run("pip", "freeze", "--python", str(self._base), quiet=True)
        return [line for line in lines if "==" in line and _normal(line) not in named]


def _site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python*/site-packages"))


def _normal(requirement: str) -> str:
    """The normalized name at the beginning of a requirement."""
    found = _NAME.match(requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""
