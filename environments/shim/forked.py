# SPDX-License-Identifier: Apache-2.0
"""Becomes a shim in a process that the daemon's zygote has forked (Linux).

    daemon ──(entry, log, control socket, listeners)──▶ zygote ──fork──▶ shim ──fork──▶ server
                                                          └── pages of what this imports ──┘ shared

The zygote imports this module at the first launch, and with it all that a shim and a server need.
The child that it forks has a session, signals and descriptors of its own, and ends neither with the
zygote nor with the daemon. `client.py` lists the cases in which no shim is forked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...env_host import preload  # noqa: F401  the modules that serve sessions
from ...env_host.bundled.benchmark import environment as benchmark  # noqa: F401
from ...env_host.bundled.echo import environment as echo  # noqa: F401
from ...system.net.listening_sockets import descriptors_text
from ...system.process import (
    diagnose,  # noqa: F401  every shim needs it when its server exits
    forking,
)
from ...system.text.json_lines import Json
from . import loop
from .files import CONTROL_FD_VARIABLE, LISTEN_FD_VARIABLE
from .server_process import set_title


def become_shim(payload: Json, fds: Sequence[int]) -> None:
    """Run as the shim of `payload["run_dir"]`; `fds` are log, control socket and listeners."""
    log_fd, control_fd, *listen_fds = fds
    forking.write_output_to(log_fd)
    os.close(log_fd)
    os.environ[CONTROL_FD_VARIABLE] = str(control_fd)
    os.environ[LISTEN_FD_VARIABLE] = descriptors_text(listen_fds)  # empty: none
    set_title(payload["title"])
    loop.run_shim(payload["run_dir"], is_forked=True)
