# SPDX-License-Identifier: Apache-2.0
"""One launch of an environment of this machine, followed through its restarts by its run files."""

from __future__ import annotations

import json
from pathlib import Path

from ..schema.errors import NotAnswering
from ..schema.protocol import (
    ENVIRONMENT_HEADER,
    GENERATION_HEADER,
    HOST_CONFIG_VARIABLE,
    HOST_OPTIONS_VARIABLE,
)
from ..system.net.access_tokens import with_token
from ..system.process.process_identity import ProcessIdentity
from . import run_files
from .http_get import check_sessions
from .run_files import RunFile
from .shim.client import read_status_file


class FollowedEnvironment:
    """The launch that had an environment's name when this was made.

    Attributes:
        name: The environment's.
        base_url: Where it answers, with its token.
        server: What its handshakes say: its name, and its launch.
    """

    def __init__(self, runs: Path, name: str) -> None:
        """Find it.

        Raises:
            NotAnswering: None of its replicas has been started here, or it has no sessions.
        """
        found = run_files.that_serves(runs, name)
        if found is None:
            hint = "openenv status shows what runs, openenv logs NAME what it printed"
            raise NotAnswering(f"{name} has no replica on this machine", hint)
        check_sessions(found)
        self._runs = runs
        self.name = name
        self._launch = found.request_id
        self.base_url = with_token(found.address, found.token)
        self.server = _server_of(found)

    def is_starting(self) -> bool:
        """Whether none of its replicas takes sessions, and it has some still. Reads some files.

        Those that are drained, since an update has replaced them, let their sessions go on.

        Raises:
            NotAnswering: It was updated, taken down, or given up.
        """
        return not any(map(_is_ready, self._replicas()))

    def _replicas(self) -> list[RunFile]:
        found = run_files.of_environment(self._runs, self.name)
        own = [run_file for run_file in found if run_file.request_id == self._launch]
        if not own and found:
            raise NotAnswering(
                f"{self.name} was updated before this had ended, and what it was has ended",
                "what has finished is kept; the same command plays the rest with what serves now",
            )
        if not own:
            raise NotAnswering(
                f"{self.name} was taken down, or has failed for good, before this had ended",
                f"what has finished is kept; launch {self.name}, and run the same command again",
            )
        return own


def _server_of(run_file: RunFile) -> tuple[str | None, str | None]:
    """What its handshakes say."""
    environ = run_file.data["env"]
    config = json.loads(environ.get(HOST_OPTIONS_VARIABLE) or environ[HOST_CONFIG_VARIABLE])
    return config["headers"][ENVIRONMENT_HEADER], config["headers"][GENERATION_HEADER]


def _is_ready(run_file: RunFile) -> bool:
    status = read_status_file(run_file.run_dir)
    if status is None or status.get("state") not in ("ready", "asleep"):
        return False
    if status.get("is_draining"):
        return False
    if not run_file.is_local:
        return True  # it does not end with its agent
    shim = status["shim"]
    return ProcessIdentity(shim["pid"], shim["started_at"]).is_alive()
