# SPDX-License-Identifier: Apache-2.0
"""`Uv`: runs uv, with pip's package index, and passes on what it says."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...schema.errors import PreparationFailed, with_last_lines
from ...system.files import disk_space
from ...system.text.hidden_values import hide_credentials
from ..command_output import run_command
from .package_index import uv_variables

LAST_LINES = 20  # of uv's output, in a failure
# A hundred packages, one line each; and what a failure shows again.
_TEDIOUS = ("+ ", "Downloaded ", "Using Python ", "error: ", "cause: ", "And because ", "hint: ")

# `error: …`, then `  cause: …`; before 0.9 `  Caused by: …`, and `╰─▶ …` of unresolvable packages.
_CAUSE = re.compile(r"\s*(?:error:|cause:|Caused by:|╰─▶)\s*(\S.*)")

# Of failures that lie in what is asked for; a file of another hash is none of them.
_OF_THE_WAY = (
    *("No solution found", "Failed to build", "Failed to parse", "Couldn't parse"),
    "Distribution not found at",  # of a folder beside the project, which was not published
)

# Of failures to reach the index, or what it names.
_OF_THE_INDEX = ("error sending request", "HTTP status server error", "operation timed out")

Say = Callable[[str], None]


class UvFailed(Exception):
    """uv exited with a code that is not 0; `lines` are its last."""

    def __init__(self, code: int, lines: list[str]) -> None:
        super().__init__(f"uv exited with code {code}")
        self.lines = lines

    @property
    def cause(self) -> str:
        """What uv gives as the innermost cause; else that it failed."""
        causes = [found[1] for line in self.lines if (found := _CAUSE.match(line))]
        return causes[-1] if causes else str(self)

    @property
    def is_of_the_way(self) -> bool:
        """Whether what was asked for cannot be installed, whatever network and disk do."""
        return any(sign in line for line in self.lines for sign in _OF_THE_WAY)

    def explained(self, message: str, hint: str) -> PreparationFailed:
        """The failure as the user is to see it: what cannot be done, and where to look.

        Its first line, which is all that a table has room for, names the cause.
        """
        text = with_last_lines(f"{message}: {self.cause}\nuv's last lines:", self.lines)
        advice = f"{hint}; packages come from {package_source()}"
        if any(sign in line for line in self.lines for sign in _OF_THE_INDEX):
            advice = f"see whether {package_source()}, where packages come from, is reached"
        if disk_space.tells_full("\n".join(self.lines)):
            advice = (
                "see with df -h which disk is full; uv cache clean and openenv prune free space"
            )
        return PreparationFailed(text, advice)


class Uv:
    """Runs uv in one folder; all methods raise `UvFailed`.

    Args:
        folder: Where it runs, and finds the settings of a project.
        say: Gets its output, line by line.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._uv = find_uv()

    def make_venv(self, python: str, venv: Path) -> None:
        """Make an empty virtual environment."""
        self.run("venv", "--quiet", "--no-project", "--python", python, str(venv))

    def install(self, venv: Path, *arguments: str) -> list[str]:
        """Install packages into a virtual environment; returns what uv said."""
        if uv_environment().get("UV_NO_INDEX"):  # uv has the option, but reads no such variable
            arguments = ("--no-index", *arguments)
        python = str(venv / "bin" / "python")
        return self.run("pip", "install", "--python", python, *arguments)

    def run(self, *arguments: str, quiet: bool = False) -> list[str]:
        """Run uv; returns its output, which goes to the log as it comes."""
        code, lines = run_command(
            [self._uv, "--color", "never", "--no-progress", *arguments],
            folder=self._folder,
            environ=uv_environment(),
            on_line=(lambda _: None) if quiet else self._relay,
        )
        if code != 0:
            raise UvFailed(code, lines[-LAST_LINES:])
        return lines

    def _relay(self, line: str) -> None:
        text = line.strip()
        if (built := text.removeprefix("Building ")) != text:
            source = "it is named by its source" if " @ " in built else "no wheel fits this Python"
            self._say(f"  uv: building {built} from source, which may take minutes: {source}")
        elif text and not text.startswith(_TEDIOUS):
            self._say(f"  uv: {line}")


def find_uv() -> str:
    """The uv that we depend on; otherwise the user's.

    Raises:
        PreparationFailed: there is none.
    """
    beside = Path(sys.executable).with_name("uv")
    if os.access(beside, os.X_OK):  # nearly always; asking the package costs 2 MB and 20 ms
        return str(beside)
    with suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin

        return str(find_uv_bin())
    if found := shutil.which("uv"):
        return found
    raise PreparationFailed("uv, which installs projects, is not installed", "pip install uv")


def uv_environment() -> dict[str, str]:
    """The environment uv runs in: ours, with pip's package index, and nothing to lead it astray."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # `uv python find` looks here first: our own Python, if the project can use it.
    environ |= uv_variables(environ) | {"VIRTUAL_ENV": sys.prefix}
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "PYTHONDONTWRITEBYTECODE": "1"}
    environ["UV_NO_WRAP"] = "1"  # else `COLUMNS` would cut the lines that causes are read from
    environ.pop("UV_PROJECT_ENVIRONMENT", None)
    return environ


def package_source() -> str:
    """Where uv gets packages from, for people."""
    environ = uv_environment()
    index = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or "uv's own index"
    if environ.get("UV_NO_INDEX"):
        index = "no index"
    links = environ.get("UV_FIND_LINKS")
    return str(hide_credentials(f"{index} and {links}" if links else index))
