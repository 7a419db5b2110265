# SPDX-License-Identifier: Apache-2.0
"""Every setting of the daemon, declared once; and the paths of its files.

Flag, environment variable, key of `config.toml` and documentation derive from `Settings`. It needs
only the standard library and platformdirs: the CLI imports it, and must start quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..system.files.disk_space import why_refused
from ..system.text.options import Option, option, options_of
from ..system.text.units import near_matches
from .layout import Layout

# Below the ephemeral range of Linux (32768) and macOS (49152): in that range, the outgoing port of
# a daemon's health poll can equal the daemon's own port.
FIRST_PORT = 8585
PORTS = 1000  # tried from there on, if no port is set
MAX_COUNT = 1_000_000_000  # of anything: a larger number is a mistake
DURABILITIES = ("process", "power")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("text", "json")


_ADDRESS = re.compile(r"(?i)[a-z][a-z\d+.-]*://|([\w.-]*|\[[\da-f:]*\]):\d+(/|$)")
_FILES = frozenset({"gateway_certificate", "gateway_key"})  # relative to where they were written


@dataclass(frozen=True)
class Settings:
    """The effective settings. Each is declared here and nowhere else."""

    port: int | None = option(
        None,
        f"TCP port of the daemon, on loopback; by default {FIRST_PORT}, or the next free one. "
        "0 picks any.",
        most=65535,
    )
    max_long_workers: int = option(0, "Maximum number of LONG workers; 0 lets the plan decide.")
    max_short_workers: int = option(0, "Maximum number of SHORT workers; 0 lets the plan decide.")
    worker_memory_mb: int = option(0, "Memory cap of a worker, in MB; 0 lets the plan decide.")
    reserve_mb: int = option(
        0, "Memory reserved for everything else, in MB; 0 lets the plan decide."
    )
    max_pending: int = option(
        100_000,
        "Maximum number of pending requests, LONG and SHORT each; more are refused (429).",
        least=1,
    )
    keep_requests: int = option(10_000, "Finished requests to keep; older ones are deleted.")
    keep_days: float = option(
        14.0,
        "Days to keep finished requests and their logs, counted while a daemon runs.",
        most=36_500,
    )
    keep_venv_days: float = option(
        30.0, "Days to keep a project's virtual environment that nothing uses.", most=36_500
    )
    max_log_mb: int = option(64, "Size limit of the log of one request or replica, in MB.", least=1)
    max_logs_mb: int = option(
        2048, "Size limit of all logs together, in MB; the oldest are deleted.", least=1
    )
    cancel_grace_seconds: float = option(5.0, "Seconds between SIGTERM and SIGKILL.", most=3600)
    durability: str = option(
        "process",
        "What an acknowledged request survives: process, a killed daemon; power, a power cut too.",
        choices=DURABILITIES,
    )
    gateway_host: str = option("127.0.0.1", "IP address that a gateway listens on.")
    gateway_port: int = option(
        0, "TCP port that a gateway listens on; 0 picks a free one.", most=65535
    )
    gateway_certificate: str = option(
        "", "File of a gateway's certificate chain, PEM; with it, the gateway speaks TLS alone."
    )
    gateway_key: str = option("", "File of the private key of a gateway's certificate, PEM.")
    log_level: str = option("info", "Level of the daemon's own log.", choices=LOG_LEVELS)
    log_format: str = option(
        "text",
        "Format of the daemon's own log: text, or json (one object a line).",
        choices=LOG_FORMATS,
    )

    @property
    def syncs(self) -> bool:
        """Return whether a request is on the disk before it is acknowledged."""
        return self.durability == "power"


class Setting(Option):
    """One setting for flags, variables and documentation; its help explains a default of None.

    Its value is a number from `least` (0) to `most` (`MAX_COUNT`), one of its choices, or any text.
    """

    @property
    def _most(self) -> float:
        return MAX_COUNT if self.most is None else self.most

    @property
    def variable(self) -> str:
        """The environment variable: `OPENENV_PORT`."""
        return f"OPENENV_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The option of `openenv up`: `--port`."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, text: str) -> Any:
        """Parse the variable's `text`. Raises `ValueError`, which names the variable."""
        try:
            return self.check(self.kind(text))
        except ValueError as exc:
            raise ValueError(f"{self.variable}={text!r}: it must be {self.range}") from exc

    def take(self, value: Any, folder: Path) -> Any:
        """Read the value from a file in `folder`. Raises `ValueError`, which names valid values."""
        kinds = (int, float) if self.kind is float else (self.kind,)
        if isinstance(value, kinds) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):
                return self.check(self.kind(value), folder)
        raise ValueError(f"it must be {self.range}")

    def check(self, value: Any, folder: Path | None = None) -> Any:
        """Return a valid value. Raises `ValueError`, which names valid values.

        A file's path is relative to `folder`, or to the working directory.
        """
        if self.name in _FILES and value:
            path = Path(os.path.expanduser(value))  # noqa: PTH111  never raises
            return os.path.abspath((folder or Path()) / path)  # noqa: PTH100
        if self.kind is str and not self.choices:
            return value
        if self.choices:
            value = value.lower()
        # This form also refuses `nan`, whose comparisons are all false.
        if value in self.choices if self.choices else (self.least or 0) <= value <= self._most:
            return value
        raise ValueError(f"{value} is not {self.range}")

    @property
    def range(self) -> str:
        """Describe the valid values in a phrase."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is str:
            return "a text"
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} from {self.least or 0:g} to {self._most:.0f}"


SETTINGS = tuple(Setting(**asdict(each)) for each in options_of(Settings))


class Given(NamedTuple):
    """The value of a setting that was set explicitly."""

    value: Any
    origin: str  # a flag, a variable, or the file's name


def given_settings(
    paths: Paths, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> dict[str, Given]:
    """Read settings: a flag, else a variable, else `config.toml`; raises `ValueError`."""
    given = _given_in_file(paths.config_file)
    for item in SETTINGS:
        if text := environ.get(item.variable):
            given[item.name] = Given(item.parse(text), item.variable)
        if item.name in flags:
            given[item.name] = Given(flags[item.name], item.flag)
    return given


def _given_in_file(path: Path) -> dict[str, Given]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as exc:
        why = why_refused(path, exc) if isinstance(exc, OSError) else exc
        raise ValueError(f"{path} cannot be read: {why}") from exc
    import tomllib  # takes 2 MB, and is rarely needed

    try:
        found = tomllib.loads(text)
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc
    given, known = {}, {item.name: item for item in SETTINGS}
    for key, value in found.items():
        if (item := known.get(key)) is None:
            _, hint = near_matches(key, known, "openenv config lists them")
            raise ValueError(f"{path}: no setting is called {key!r}; {hint}")
        try:
            given[item.name] = Given(item.take(value, path.parent), path.name)
        except ValueError as exc:
            raise ValueError(f"{path}: {key} = {value!r}: {exc}") from exc
    return given


def flags_of_killed(paths: Paths) -> dict[str, Any]:
    """Return the previous daemon's flags if it was killed, so that the next one has them, too.

    A daemon that is stopped removes `daemon.json`, and its flags are not kept.
    """
    known: dict[str, Any] = {}
    try:
        found = dict(json.loads(paths.daemon_file.read_bytes())["flags"])
    except (OSError, ValueError, KeyError, TypeError):
        return known
    for item in SETTINGS:
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # another version's
            if item.name in found:
                known[item.name] = item.check(item.kind(found[item.name]))
    return known


class Paths(Layout):
    """The paths of one daemon: those that replicas need (`Layout`), and the others."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.start_lock = home / "start.lock"  # held by the process that starts the daemon
        self.daemon_lock = home / "daemon.lock"  # held by the daemon for as long as it runs
        self.daemon_file = home / "daemon.json"  # its pid, start time, version, address, socket
        self.config_file = home / "config.toml"  # the settings that the user has written down
        self.token = home / "token"  # required by every call
        # Leads a browser to the dashboard's one-time link; removed at sign-in.
        self.sign_in_page = home / "sign-in.html"
        self.database = home / "requests.db"
        self.daemon_log = home / "daemon.log"
        self.request_logs = home / "logs" / "requests"
        self.socket = self.sockets / "daemon.sock"  # of the API

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Paths:
        """Return the paths in `OPENENV_HOME` or the platform's state folder.

        Raises `ValueError`: it is an address.
        """
        environ = os.environ if environ is None else environ
        if named := environ.get("OPENENV_HOME"):
            if _ADDRESS.match(named):
                advice = "openenvd.client.Session(ADDRESS) opens a session of any environment"
                raise ValueError(f"a home is a folder, not an address: {named!r}; {advice}")
            return cls(Path(os.path.expanduser(named)).absolute())  # noqa: PTH111  never raises
        from platformdirs import user_state_path

        return cls(user_state_path("openenvd"))

    def request_log(self, request_id: str) -> Path:
        """Return the log of one request."""
        return self.request_logs / f"{request_id}.log"
