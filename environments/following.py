# SPDX-License-Identifier: Apache-2.0
"""One launch of an environment of this machine, followed through its restarts by its run files."""

from __future__ import annotations

import json
from pathlib import Path

from ..env_host.protocol import ENVIRONMENT_HEADER, GENERATION_HEADER, HOST_CONFIG_VARIABLE
from ..shim.client import read_status_file
from ..system.access_tokens import with_token
from ..system.process_identity import ProcessIdentity
from . import run_files
from .errors import NotAnswering
from .run_files import RunFile


class FollowedEnvironment:
    """The launch that had an environment's name when this was made.

    Attributes:
        base_url: Where it answers, with its token.
        server: What its handshakes say: its name, and its launch.
    """

    def __init__(self, runs: Path, name: str) -> None:
        """Find it.

        Raises:
            NotAnswering: None of its replicas has been started here.
        """
        found = run_files.of_environment(runs, name)
        if not found:
            hint = "openenv status shows what runs, openenv logs NAME what it printed"
            raise NotAnswering(f"{name} has no replica on this machine", hint)
        self._runs = runs
        self._name = name
        self._launch = found[0].request_id
        self.base_url = with_token(found[0].address, found[0].token)
        self.server = _server_of(found[0])

    def is_starting(self) -> bool:
        """Whether none of its replicas is ready, and some are to become so. Reads some files.

        Raises:
            NotAnswering: It was taken down, or given up.
        """
        found = run_files.of_environment(self._runs, self._name)
        own = [run_file for run_file in found if run_file.request_id == self._launch]
        if not own:
            raise NotAnswering(
                f"{self._name} was taken down, or has failed for good, before this had ended",
                f"what has finished is kept; launch {self._name}, and run the same command again",
            )
        return not any(map(_is_ready, own))


def _server_of(run_file: RunFile) -> tuple[str | None, str | None]:
    """What its handshakes say; nothing where an earlier version started it."""
    config = json.loads(run_file.data["env"][HOST_CONFIG_VARIABLE])
    headers = config.get("headers", {})
    return headers.get(ENVIRONMENT_HEADER), headers.get(GENERATION_HEADER)


def _is_ready(run_file: RunFile) -> bool:
    status = read_status_file(run_file.run_dir)
    if status is None or status.get("state") != "ready":
        return False
    shim = status["shim"]
    return ProcessIdentity(shim["pid"], shim["started_at"]).is_alive()
