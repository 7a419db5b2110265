# SPDX-License-Identifier: Apache-2.0
"""Virtual environments laid over another one, for a try with more packages: `launch --with`.

    venvs/<key>/    the further packages alone; those of the base, which stays as it is, are found
                    after them, through a `.pth` file (uv's own `run --with` does the same)

The key is made of the base and the packages. What both need keeps the version that the base has,
unless it is named.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...schema.layout import Layout
from ...schema.protocol import HOST_LIBRARIES
from ...system.text.hidden_values import hide_credentials
from ..sources.needs import normalized
from .project_venv import KEY_VERSION, make_once, site_packages
from .uv import Say, Uv, UvFailed

PTH = "openenvd-base.pth"


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
    below = python.parent.parent
    venv = layout.venvs / overlay_key(python, packages, folder)
    named = hide_credentials(", ".join(packages))

    def build() -> None:
        say(f"installing {named} beside the dependencies")
        try:
            _install(Uv(folder, say), python, packages, venv)
        except UvFailed as exc:
            message = f"{named} cannot be installed beside the dependencies"
            raise exc.explained(message, "look at --with") from exc
        if (below / HOST_LIBRARIES).is_dir():  # else our own has them among its packages
            (venv / HOST_LIBRARIES).symlink_to(below / HOST_LIBRARIES)
        is_own = str(python) == sys.executable
        first = sysconfig.get_path("purelib") if is_own else str(site_packages(below))
        (site_packages(venv) / PTH).write_text(f"import site; site.addsitedir({first!r})\n")

    return make_once(venv, {"base": str(below)}, build, say)


def overlay_key(base: Path, packages: Sequence[str], folder: Path) -> str:
    """Return the key of the environment with these packages over that of the Python `base`."""
    parts = [str(KEY_VERSION), str(base), *sorted(packages)]
    if any("/" in package for package in packages):
        parts.append(str(folder))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _install(uv: Uv, base: Path, packages: Sequence[str], venv: Path) -> None:
    """Install packages beside what the base has, which stays as it is but for those named."""
    uv.make_venv(str(base), venv)
    named = {normalized(package) for package in packages}
    had = uv.run("pip", "freeze", "--python", str(base), quiet=True)
    kept = [line for line in had if "==" in line and normalized(line) not in named]
    with tempfile.NamedTemporaryFile("w", prefix="openenvd-", suffix=".txt") as constraints:
        constraints.write("\n".join(kept))
        constraints.flush()
        uv.install(venv, "-c", constraints.name, "--", *packages)
