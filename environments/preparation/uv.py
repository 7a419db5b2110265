# SPDX-License-Identifier: Apache-2.0
"""`Uv` runs uv with pip's package index, and passes on its output; `run_command` runs any command.

Many machines are set up for pip alone (a mirror, a folder of wheels, a company's certificate), and
uv does not read pip's settings. A setting of uv itself takes precedence.

    pip's files, in pip's order, and then PIP_* variables ─▶ uv_variables ─▶ the environment of uv
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...schema.errors import PreparationFailed, with_last_lines
from ...system.files import disk_space
from ...system.process.process_identity import ProcessIdentity
from ...system.process.tree import stop_tree
from ...system.text.safe_text import hide_credentials
from ..sources.needs import read_toml

STOP_GRACE_SECONDS = 2.0


def run_command(
    argv: Sequence[str],
    *,
    folder: Path,
    environ: Mapping[str, str],
    on_line: Callable[[str], None],
    stdin: IO[bytes] | None = None,
) -> tuple[int, list[str]]:
    """Run a command in a folder; return its exit code, and the lines of both its streams.

    `on_line` gets each line as it comes. If the launch is cancelled, the command is ended, with all
    processes that it has started. Raises `OSError` if it cannot be started.
    """
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    with process:
        try:
            assert process.stdout is not None
            for line in map(str.rstrip, process.stdout):
                on_line(line)
                lines.append(line)
            code = process.wait()
        except BaseException:
            if process.poll() is None:  # it was not reaped, so the pid is still its own
                identity = ProcessIdentity.of(process.pid)
                stop_tree(identity, grace_seconds=STOP_GRACE_SECONDS, session=False)
            raise
    return code, [line for line in lines if line]


LAST_LINES = 20  # of uv's output, in a failure
# Lines that are not shown: one for each of a hundred packages, and those that a failure repeats.
_TEDIOUS = ("+ ", "Downloaded ", "Using Python ", "error: ", "cause: ", "And because ", "hint: ")

# `error: …`, then `  cause: …`; before 0.9 `  Caused by: …`, and `╰─▶ …` of unresolvable packages.
_CAUSE = re.compile(r"\s*(?:error:|cause:|Caused by:|╰─▶)\s*(\S.*)")

# Parts of messages about the requested packages; a file of another hash is another failure.
_OF_THE_WAY = (
    *("No solution found", "Failed to build", "Failed to parse", "Couldn't parse"),
    "Distribution not found at",  # a folder beside the project, which was not published
)

# Parts of messages about the index, or the files that it names.
_OF_THE_INDEX = ("error sending request", "HTTP status server error", "operation timed out")

Say = Callable[[str], None]


class UvFailed(Exception):
    """uv exited with a code other than 0; `lines` are its last lines."""

    def __init__(self, code: int, lines: list[str]) -> None:
        super().__init__(f"uv exited with code {code}")
        self.lines = lines

    @property
    def cause(self) -> str:
        """Return the innermost cause in uv's output, or else that uv failed."""
        causes = [found[1] for line in self.lines if (found := _CAUSE.match(line))]
        return causes[-1] if causes else str(self)

    @property
    def is_of_the_way(self) -> bool:
        """Return whether the packages cannot be installed, whatever network and disk do."""
        return any(sign in line for line in self.lines for sign in _OF_THE_WAY)

    def explained(self, message: str, hint: str) -> PreparationFailed:
        """Return the error for the user: what cannot be done, and where to look.

        Its first line names the cause, as a table has room for one line.
        """
        text = with_last_lines(f"{message}: {self.cause}\nuv's last lines:", self.lines)
        if disk_space.tells_full("\n".join(self.lines)):
            hint = "see with df -h which disk is full; uv cache clean and openenv prune free space"
        elif any(sign in line for line in self.lines for sign in _OF_THE_INDEX):
            hint = f"see whether {package_source()}, where packages come from, is reached"
        else:
            hint = f"{hint}; packages come from {package_source()}"
        return PreparationFailed(text, hint)


class Uv:
    """Runs uv in one folder, and prints its output; all methods raise `UvFailed`."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._uv = find_uv()

    def make_venv(self, python: str, venv: Path) -> None:
        """Make an empty virtual environment."""
        self.run("venv", "--quiet", "--no-project", "--python", python, str(venv))

    def install(self, venv: Path, *arguments: str) -> list[str]:
        """Install packages into a virtual environment; return uv's output."""
        if uv_environment().get("UV_NO_INDEX"):  # uv has the option, but reads no such variable
            arguments = ("--no-index", *arguments)
        python = str(venv / "bin" / "python")
        return self.run("pip", "install", "--python", python, *arguments)

    def run(self, *arguments: str, quiet: bool = False) -> list[str]:
        """Run uv; return its output, which goes to the log as it comes."""
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
    """Return the uv that we depend on."""
    beside = Path(sys.executable).with_name("uv")
    if os.access(beside, os.X_OK):  # nearly always; the package would cost 2 MB and 20 ms
        return str(beside)
    from uv import find_uv_bin

    return str(find_uv_bin())


def uv_environment() -> dict[str, str]:
    """Return uv's variables: ours, with pip's package index, without those that mislead it."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # `uv python find` looks here first: our own Python, if the project can use it.
    environ |= uv_variables(environ) | {"VIRTUAL_ENV": sys.prefix}
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "PYTHONDONTWRITEBYTECODE": "1"}
    environ["UV_NO_WRAP"] = "1"  # otherwise `COLUMNS` would break lines that causes are read from
    environ.pop("UV_PROJECT_ENVIRONMENT", None)
    return environ


def package_source() -> str:
    """Return the source of uv's packages, for people."""
    environ = uv_environment()
    index = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or "uv's own index"
    if environ.get("UV_NO_INDEX"):
        index = "no index"
    links = environ.get("UV_FIND_LINKS")
    return str(hide_credentials(f"{index} and {links}" if links else index))


# pip's options, and uv's variables for the same.
_VARIABLE_OF_OPTION = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
_INDEX_OPTIONS = {"index-url", "extra-index-url", "find-links", "no-index"}
# Any of these is the user's own setting of uv's index: in its file, or as a variable.
_UV_INDEX_KEYS = {"index", "default-index", *_INDEX_OPTIONS}
_UV_INDEX_VARIABLES = {f"UV_{key.upper().replace('-', '_')}" for key in _UV_INDEX_KEYS}
SYSTEM_FILES = (Path("/etc/pip.conf"), Path("/etc/uv/uv.toml"))  # pip's, uv's
_PIP_SECTIONS = ("global", "install")  # the later one wins


def uv_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables by which uv finds packages as pip does."""
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME") or Path.home())
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    named = environ.get("UV_CONFIG_FILE")
    files = [Path(named)] if named else [config / "uv" / "uv.toml", SYSTEM_FILES[1]]
    has_own = bool(_UV_INDEX_VARIABLES & set(environ))
    has_own = has_own or any(_names_an_index(read_toml(path)) for path in files)
    found = {}
    for name, value in _pip_settings(environ):
        option = name.lower().replace("_", "-")
        if option in _VARIABLE_OF_OPTION and not (has_own and option in _INDEX_OPTIONS):
            found[_VARIABLE_OF_OPTION[option]] = _value(option, value)
    return {name: value for name, value in found.items() if value and name not in environ}


def _pip_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of pip's settings; the last value of a name counts."""
    for path in pip_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # pip itself reports a broken file
        for section in filter(parser.has_section, _PIP_SECTIONS):
            yield from parser.items(section)
    for name, value in environ.items():
        if name.startswith("PIP_"):
            yield name.removeprefix("PIP_"), value


def pip_files(environ: Mapping[str, str]) -> list[Path]:
    """Return pip's configuration files in the order in which it reads them; the last one wins."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    system = environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(folder) / "pip" / "pip.conf" for folder in system.split(os.pathsep) if folder]
    files += [SYSTEM_FILES[0], home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]
    if sys.platform == "darwin":
        files.append(home / "Library" / "Application Support" / "pip" / "pip.conf")
    files.append(Path(sys.prefix) / "pip.conf")
    return [*files, Path(named)] if named else files


def _value(name: str, value: str) -> str:
    if name == "no-index":
        return "1" if value.strip().lower() in ("1", "true", "yes", "on") else ""
    return ("," if name == "find-links" else " ").join(value.split())  # pip has blanks


def _names_an_index(settings: dict[str, Any]) -> bool:
    pip = settings.get("pip")
    return bool(_UV_INDEX_KEYS & set(settings)) or (isinstance(pip, dict) and _names_an_index(pip))
