# SPDX-License-Identifier: Apache-2.0
"""`SshConnection`: one connection to another machine, by the command `ssh`, for everything.

    ssh -M -N -f HOST        the master: it holds the connection, in the background
      ├── a channel for each command that runs there
      └── forwarded ports    127.0.0.1:PORT here ──▶ a server that HOST reaches

The user's own ssh configuration counts (names, users, keys, jump hosts); no password is asked for.
A master that somebody has opened by hand at the same socket is used as it is, so one-time codes can
be typed there. It ends `PERSIST_SECONDS` after the last that went through it, sessions of replicas
included: whoever opened it may be killed, and its successor goes on with the same one.

Failure cases

    the host is unknown, refuses the key,   `EngineGone` says which, and what to do; the next call
    is itself not known, does not answer    tries again
    the connection is lost                  the master ends: at once, or after 15 s in which nothing
                                            has come. So do the commands there and the sessions; the
                                            next `open` makes another
    the host allows no forwarding           the connection is made here, and ends there: `refusal`
                                            says why
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .base import EngineGone

CONNECT_SECONDS = 15
PERSIST_SECONDS = 3  # of a master that nobody uses
ALIVE_SECONDS, ALIVE_COUNT = 5, 3  # between two signs of life, and how many may be missing
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": CONNECT_SECONDS,
    "ControlPersist": PERSIST_SECONDS,
    "ServerAliveInterval": ALIVE_SECONDS,
    "ServerAliveCountMax": ALIVE_COUNT,
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
    "RemoteCommand": "none",
}
INSTALL = "install OpenSSH's client: apt install openssh-client"
TOLD_LINES = 3  # of what ssh has printed, in an error
REFUSED_SECONDS = 15.0  # for the host to say that it may not connect somewhere
_LOST = 255  # ssh's own exit code
_PROHIBITED = "administratively prohibited"
# What ssh complains about, in lower case, and what that means.
_CAUSES = {
    "could not resolve hostname": ("is unknown", "see that this works: ssh {host} true"),
    "host key verification failed": (
        "is not known yet, or has another key than before",
        "connect by hand once, and look at the key: ssh {host} true",
    ),
    "permission denied": (
        "refuses this user's keys",
        "see that this asks nothing: ssh {host} true (ssh-add); or answer by hand: {by_hand}",
    ),
    "too many authentication failures": (
        "refuses this user's keys",
        "name the right one: IdentityFile and IdentitiesOnly in ~/.ssh/config",
    ),
    "connection refused": ("has no ssh server", "see that this works: ssh {host} true"),
    "timed out": ("does not answer", "see that this works: ssh {host} true"),
    "no route to host": ("cannot be reached", "see that this works: ssh {host} true"),
    "network is unreachable": ("cannot be reached", "see that this works: ssh {host} true"),
}


class SshConnection:
    """One connection; its methods block.

    Args:
        host: As `ssh` takes it: a name of the user's configuration, user@host, ssh://host:port.
        sockets: A private folder, for the master's socket.
    """

    def __init__(self, host: str, sockets: Path) -> None:
        self.host = host
        digest = hashlib.sha256(host.encode()).hexdigest()[:8]
        self.socket = sockets / f"ssh-{digest}"

    def open(self) -> None:
        """See that there is a master: this one's, another's, or a new one.

        Raises:
            EngineGone
        """
        if self._control("check") is None:
            return
        self.socket.unlink(missing_ok=True)  # of a master that was killed
        with tempfile.TemporaryFile() as told:  # no pipe: the master keeps it
            code = self._run(self._ssh("-M", "-N", "-f", "ClearAllForwardings=yes"), told)
            if code != 0:
                raise self.failure(told)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs another one there, through the master if there is one.

        Args:
            words: What is run, without a shell's variables; relative to the user's home there.

        Raises:
            EngineGone: There is no ssh here.
        """
        return [*self._ssh("ControlMaster=no"), f"exec {shlex.join(words)}"]

    def forward(self, port: int, target: str) -> bool:
        """Forward a port of this machine's loopback; whether it is, or was already.

        Args:
            port: The port here.
            target: `host:port`, as seen from there.
        """
        return self._control("forward", "-L", f"127.0.0.1:{port}:{target}") is None

    def refusal(self, target: str) -> str | None:
        """Return what the host says when it may not connect to a target; None: it may.

        It is asked through a connection of its own: a master does not pass on what it was told.
        Where such a one needs a code to be typed, nothing is known.

        Args:
            target: `host:port`, as seen from there.
        """
        with tempfile.TemporaryFile() as told:
            command = self._ssh("ControlMaster=no", "-W", target, socket="none")
            self._run(command, told, REFUSED_SECONDS)
            told.seek(0)
            lines = told.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in lines if _PROHIBITED in line.lower()), None)

    def cancel(self, port: int, target: str) -> None:
        """Forward a port no more."""
        self._control("cancel", "-L", f"127.0.0.1:{port}:{target}")

    def failure(self, told: IO[bytes]) -> EngineGone:
        """Return what is wrong with the connection, from what ssh has printed."""
        told.seek(0)
        lines = [line.strip() for line in told.read().decode(errors="replace").splitlines()]
        said = "; ".join(dict.fromkeys(filter(None, lines[-TOLD_LINES:]))) or "it does not say why"
        by_hand = (
            f"ssh -fNM -o ControlPersist=yes -o ServerAliveInterval={ALIVE_SECONDS} "
            f"-o ServerAliveCountMax={ALIVE_COUNT} -S {self.socket} {self.host}"
        )
        for words, (what, remedy) in _CAUSES.items():
            if words in said.lower():
                hint = remedy.format(host=self.host, by_hand=by_hand)
                return EngineGone(f"the host {self.host} {what} ({said})", hint)
        text = f"the connection to {self.host} is lost, or cannot be made: {said}"
        return EngineGone(text, f"see that this works: ssh {self.host} true")

    def _control(self, *words: str) -> str | None:
        """Ask the master for something; why it does not, None: it does."""
        with tempfile.TemporaryFile() as told:
            if self._run([*self._ssh("ControlMaster=no", "-O", *words)], told) == 0:
                return None
            told.seek(0)
            return told.read().decode(errors="replace").strip() or "it does not say why"

    def _ssh(self, *words: str, socket: str | None = None) -> list[str]:
        if shutil.which("ssh") is None:
            raise EngineGone("there is no command ssh here", INSTALL)
        options = [f"{name}={value}" for name, value in _OPTIONS.items()]
        options += [word for word in words if "=" in word]
        flags = [word for word in words if "=" not in word]
        settings = [part for option in options for part in ("-o", option)]
        return ["ssh", "-S", socket or str(self.socket), *settings, *flags, "--", self.host]

    def _run(
        self, command: Sequence[str], told: IO[bytes], seconds: float = 2 * CONNECT_SECONDS
    ) -> int:
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
                timeout=seconds,
                check=False,
                start_new_session=True,
            ).returncode
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                told.write(b"it timed out\n")
            return _LOST
