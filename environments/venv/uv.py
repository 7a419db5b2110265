# SPDX-License-Identifier: Apache-2.0
"""`Uv`: runs uv, with pip's package index, and passes on what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ...processes.tree import stop_tree
from ...system.process_identity import ProcessIdentity
from ..errors import PreparationFailed, with_last_lines
from .package_index import uv_variables

LAST_LINES = 20  # of uv's output, in a failure
STOP_GRACE_SECONDS = 2.0
_TEDIOUS = ("+ ", "Downloaded ", "Using Python ")  # a hundred packages, one line each

Say = Callable[[str], None]


class UvFailed(Exception):
    """uv exited with a code that is not 0; `lines` are its last."""

    def __init__(self, code: int, lines: list[str]) -> None:
        super().__init__(f"uv exited with code {code}")
        self.lines = lines

    def explained(self, message: str, hint: str) -> PreparationFailed:
        """The failure as the user is to see it: what cannot be done, and where to look."""
        text = with_last_lines(f"{message} ({self}); uv's last lines:", self.lines)
        return PreparationFailed(text, f"{hint}; packages come from {package_source()}")


class Uv:
    """Runs uv in one folder.

    Args:
        folder: Where it runs, and finds the settings of a project.
        say: Gets its output, line by line.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._uv = find_uv()

    def make_venv(self, python: str, venv: Path) -> None:
        """Make an empty virtual environment.

        Raises:
            UvFailed
        """
        self.run("venv", "--quiet", "--no-project", "--python", python, str(venv))

    def install(self, venv: Path, *arguments: str) -> list[str]:
        """Install packages into a virtual environment; returns what uv said.

        Raises:
            UvFailed
        """
        if uv_environment().get("UV_NO_INDEX"):  # uv has the option, but reads no such variable
            arguments = ("--no-index", *arguments)
        python = str(venv / "bin" / "python")
        return self.run("pip", "install", "--python", python, *arguments)

    def run(self, *arguments: str, quiet: bool = False) -> list[str]:
        """Run uv; returns its output, which goes to the log as it comes.

        Raises:
            UvFailed
        """
        process = subprocess.Popen(
            [self._uv, "--color", "never", "--no-progress", *arguments],
            cwd=self._folder,
            env=uv_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with process:
            try:
                assert process.stdout is not None
                said = filter(None, self._relay(process.stdout, quiet=quiet))
                lines = list(said)
                code = process.wait()
            except BaseException:  # uv, and the build it may be running, end with the launch
                if process.poll() is None:  # not collected, so that the pid is still its own
                    identity = ProcessIdentity.of(process.pid)
                    stop_tree(identity, grace_seconds=STOP_GRACE_SECONDS, session=False)
                raise
        if code != 0:
            raise UvFailed(code, lines[-LAST_LINES:])
        return lines

    def _relay(self, output: Iterator[str], *, quiet: bool) -> Iterator[str]:
        for line in map(str.rstrip, output):
            if not quiet and line and not line.lstrip().startswith(_TEDIOUS):
                self._say(f"  uv: {line}")
            yield line


def find_uv() -> str:
    """The uv that we depend on; otherwise the user's.

    Raises:
        PreparationFailed: there is none.
    """
    beside = Path(sys.executable).with_name("uv")
    if os.access(beside, os.X_OK):  # nearly always; asking the package costs 2 MB and 20 ms
        return str(beside)
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise PreparationFailed("uv, which installs projects, is not installed", "pip install uv")
    return found


def uv_environment() -> dict[str, str]:
    """The environment uv runs in: ours, with pip's package index, and nothing to lead it astray."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # `uv python find` looks here first: our own Python, if the project can use it.
    environ |= uv_variables(environ) | {"VIRTUAL_ENV": sys.prefix}
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "PYTHONDONTWRITEBYTECODE": "1"}
    environ.pop("UV_PROJECT_ENVIRONMENT", None)
    return environ


def package_source() -> str:
    """Where uv gets packages from, for people."""
    environ = uv_environment()
    index = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or "uv's own index"
    if environ.get("UV_NO_INDEX"):
        index = "no index"
    links = environ.get("UV_FIND_LINKS")
    return f"{_without_password(index)} and {links}" if links else _without_password(index)


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url
