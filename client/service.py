# SPDX-License-Identifier: Apache-2.0
"""The daemon as a service of this user: a unit of systemd, or an agent of launchd on macOS.

    openenv up --service      is there a service manager? ─▶ stop the daemon ─▶ write the file
                              ─▶ enable and start ─▶ wait for it
    openenv up --no-service   stop and disable ─▶ remove the file; environments continue
    any other command         is no daemon there, and the file is? ─▶ start the service (`resume`)

The service manager ends the daemon alone, never its environments, and delegates the memory
controller, so that replicas have memory limits. Each home has a service of its own. A manager that
is absent or refuses raises `DaemonNotStarted`, with its own words; the file is then removed.
"""

from __future__ import annotations

import hashlib
import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..schema.settings import Paths
from .errors import DaemonNotStarted

MANAGER_SECONDS = 60.0
_HINT = "without a service manager, openenv up starts the daemon until the machine is shut down"


class SystemdUnit:
    """A unit of the user's systemd; `lasts` says how long it runs."""

    lasts = "it ends with your last session, unless loginctl enable-linger was run"

    def __init__(self, name: str) -> None:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        self._unit = f"{name}.service"
        self.path = Path(folder) / "systemd" / "user" / self._unit

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Write the unit, enable it, and start it."""
        _write(self.path, unit_text(command, variables).encode())
        try:
            _run("systemctl", "--user", "daemon-reload")
            _run("systemctl", "--user", "enable", self._unit)
            _run("systemctl", "--user", "restart", self._unit)
        except DaemonNotStarted:
            with suppress(DaemonNotStarted):
                self.remove()
            raise

    def check(self) -> None:
        """Check that the user's service manager answers; raises `DaemonNotStarted`."""
        _run("systemctl", "--user", "show-environment")

    def resume(self) -> None:
        """Start the unit."""
        _run("systemctl", "--user", "start", self._unit)

    def remove(self) -> None:
        """Disable and stop the unit, and remove it."""
        _check_exists(self.path)
        _run("systemctl", "--user", "disable", "--now", self._unit)
        self.path.unlink()
        _run("systemctl", "--user", "daemon-reload")


class LaunchdAgent:
    """An agent of macOS's launchd."""

    lasts = "it runs while you are logged in"

    def __init__(self, name: str) -> None:
        self._label = f"io.{name}"
        self._domain = f"gui/{os.getuid()}"
        self.path = Path.home() / "Library" / "LaunchAgents" / f"{self._label}.plist"

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Write the property list, and load it."""
        agent = {
            "Label": self._label,
            "ProgramArguments": list(command),
            "EnvironmentVariables": dict(variables),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "AbandonProcessGroup": True,  # environments outlive the daemon
        }
        with suppress(DaemonNotStarted):  # it is not loaded yet
            _run("launchctl", "bootout", f"{self._domain}/{self._label}")
        _write(self.path, plistlib.dumps(agent))
        _run("launchctl", "bootstrap", self._domain, str(self.path))

    def check(self) -> None:
        """Raise `DaemonNotStarted` if the user has no graphical session; `ssh` starts none."""
        _run("launchctl", "print", self._domain)

    def resume(self) -> None:
        """Start the agent, which stays loaded."""
        _run("launchctl", "kickstart", f"{self._domain}/{self._label}")

    def remove(self) -> None:
        """Unload the agent, and remove its file."""
        _check_exists(self.path)
        _run("launchctl", "bootout", f"{self._domain}/{self._label}")
        self.path.unlink()


def service_of(home: Path) -> SystemdUnit | LaunchdAgent:
    """Return the service of a home, whether or not it exists."""
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:8]
    name = "openenvd" if home == Paths.from_environment({}).home else f"openenvd-{digest}"
    return LaunchdAgent(name) if sys.platform == "darwin" else SystemdUnit(name)


def resume(home: Path) -> bool:
    """Start the service of a home; return False if it has none or no service manager answers."""
    service = service_of(home)
    with suppress(DaemonNotStarted, OSError):
        if service.path.exists():
            service.resume()
            return True
    return False


def unit_text(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the content of a systemd unit; `env` takes names that systemd refuses to execute."""
    given = "".join(f"Environment={_quoted(f'{k}={v}')}\n" for k, v in variables.items())
    argv = " ".join(_quoted(word).replace("$", "$$") for word in command)
    return f"""[Unit]
Description=openenvd, which runs OpenEnv environments

[Service]
ExecStart=/usr/bin/env {argv}
{given}KillMode=process
Delegate=yes
Restart=on-failure

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """Return a word as systemd.syntax(7) reads it: nothing in it is expanded."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped.replace("%", "%%")}"'


def _write(path: Path, content: bytes) -> None:
    """Write a file that only the user may read: it has variables, such as tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise DaemonNotStarted("no_service", f"there is no service: {path} does not exist")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MANAGER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DaemonNotStarted("service", f"{command[0]} cannot be used: {exc}", _HINT) from exc
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise DaemonNotStarted("service", f"{' '.join(command)}: {said}", _HINT)
