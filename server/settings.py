# SPDX-License-Identifier: Apache-2.0
"""Every setting of the daemon, declared once; and where its files are.

Flag, environment variable and documentation derive from `Settings`. Standard library and
platformdirs alone: the CLI imports this module, and must start quickly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..environments.layout import Layout

# Below the ephemeral range of Linux (32768) and macOS (49152): a daemon on a higher port was
# seen to meet its own health poll's outgoing port.
DEFAULT_PORT = 8585
MAX_COUNT = 1_000_000_000  # of anything: what is more was not meant
DURABILITIES = ("process", "power")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("text", "json")


def _setting(
    default: Any, text: str, *, least: float = 0, most: float = MAX_COUNT, among: Any = None
) -> Any:
    bounds = {"least": least, "most": most, "among": among}
    return field(default=default, metadata={"help": text, **bounds})


@dataclass(frozen=True)
class Settings:
    """The settings in force. Each is declared here and nowhere else."""

    port: int = _setting(
        DEFAULT_PORT, "TCP port of the daemon, on loopback; 0 picks a free one.", most=65535
    )
    max_long_workers: int = _setting(0, "Maximum number of LONG workers; 0 lets the plan decide.")
    max_short_workers: int = _setting(0, "Maximum number of SHORT workers; 0 lets the plan decide.")
    worker_memory_mb: int = _setting(0, "Memory cap of a worker, in MB; 0 lets the plan decide.")
    reserve_mb: int = _setting(
        0, "Memory reserved for everything else, in MB; 0 lets the plan decide."
    )
    max_pending: int = _setting(
        100_000,
        "Maximum number of pending requests, LONG and SHORT each; more are refused (429).",
        least=1,
    )
    keep_requests: int = _setting(10_000, "Finished requests to keep; older ones are deleted.")
    keep_days: float = _setting(
        14.0,
        "Days to keep finished requests and their logs, counted while a daemon runs.",
        most=36_500,
    )
    keep_venv_days: float = _setting(
        30.0, "Days to keep a project's virtual environment that nothing uses.", most=36_500
    )
    max_log_mb: int = _setting(
        64, "Size limit of the log of one request or replica, in MB.", least=1
    )
    max_logs_mb: int = _setting(
        2048, "Size limit of all logs together, in MB; the oldest are deleted.", least=1
    )
    cancel_grace_seconds: float = _setting(5.0, "Seconds between SIGTERM and SIGKILL.", most=3600)
    durability: str = _setting(
        "process",
        "What an acknowledged request survives: process, a killed daemon; power, a power cut too.",
        among=DURABILITIES,
    )
    log_level: str = _setting("info", "Level of the daemon's own log.", among=LOG_LEVELS)
    log_format: str = _setting(
        "text",
        "Format of the daemon's own log: text, or json (one object a line).",
        among=LOG_FORMATS,
    )

    @property
    def syncs(self) -> bool:
        """Whether what is acknowledged is on the disk."""
        return self.durability == "power"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Defaults, overridden by `OPENENV_*` variables.

        Raises:
            ValueError: naming the variable whose value does not parse.
        """
        environ = os.environ if environ is None else environ
        values = {s.name: s.parse(environ[s.variable]) for s in SETTINGS if environ.get(s.variable)}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as flags, variables and documentation need it."""

    name: str
    type: type
    default: Any
    help: str
    least: float
    most: float
    among: tuple[str, ...] | None

    @property
    def variable(self) -> str:
        """The environment variable: `OPENENV_PORT`."""
        return f"OPENENV_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The option of `openenv up`: `--port`."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, text: str) -> Any:
        """The value that the variable's `text` spells.

        Raises:
            ValueError: naming the variable.
        """
        try:
            return self.check(self.type(text))
        except ValueError as exc:
            raise ValueError(f"{self.variable}={text!r}: it must be {self.range}") from exc

    def check(self, value: Any) -> Any:
        """The value, if it may be one.

        Raises:
            ValueError: saying what it may be.
        """
        if self.among is not None:
            value = value.lower()
        # Not the other way round: a `nan` is neither more nor less than anything.
        if value in self.among if self.among is not None else self.least <= value <= self.most:
            return value
        raise ValueError(f"{value} is not {self.range}")

    @property
    def range(self) -> str:
        """What it may be, as a phrase."""
        if self.among is not None:
            return f"one of {', '.join(self.among)}"
        kind = "a whole number" if self.type is int else "a number"
        return f"{kind} from {self.least:g} to {self.most:.0f}"


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(item.name, type(item.default), item.default, **item.metadata)
    for item in fields(Settings)
)


@dataclass(frozen=True, slots=True)
class Paths(Layout):
    """The paths of one daemon: what replicas need (`Layout`), and the rest."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Paths:
        """`OPENENV_HOME`, or the platform's state folder (`~/.local/state/openenvd` on Linux)."""
        environ = os.environ if environ is None else environ
        if named := environ.get("OPENENV_HOME"):
            return cls(Path(os.path.expanduser(named)).absolute())  # noqa: PTH111  never raises
        from platformdirs import user_state_path

        return cls(user_state_path("openenvd"))

    @property
    def start_lock(self) -> Path:
        """Held by the process that starts the daemon."""
        return self.home / "start.lock"

    @property
    def daemon_lock(self) -> Path:
        """Held by the daemon for as long as it runs."""
        return self.home / "daemon.lock"

    @property
    def daemon_file(self) -> Path:
        """Who the daemon is: pid, start time, version, address, socket."""
        return self.home / "daemon.json"

    @property
    def token(self) -> Path:
        """The token that every call needs."""
        return self.home / "token"

    @property
    def database(self) -> Path:
        """The requests database."""
        return self.home / "requests.db"

    @property
    def daemon_log(self) -> Path:
        """The daemon's own log."""
        return self.home / "daemon.log"

    @property
    def request_logs(self) -> Path:
        """The folder of the logs of requests."""
        return self.home / "logs" / "requests"

    @property
    def socket(self) -> Path:
        """The Unix socket of the API."""
        return self.sockets / "daemon.sock"

    def request_log(self, request_id: str) -> Path:
        """The log of one request."""
        return self.request_logs / f"{request_id}.log"
