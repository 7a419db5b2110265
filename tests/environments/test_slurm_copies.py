# SPDX-License-Identifier: Apache-2.0
"""When copies of what is launched are removed from a login node, and which."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.engines.base import Instance, InstanceState, Labels
from openenvd.environments.engines.slurm_ssh import SlurmOverSsh

SECONDS = 10.0
LABELS = Labels("home", "sample", "sample-0-abc", "abc")
JOB = Instance(id="7", labels=LABELS, state=InstanceState.RUNNING)


class LoginChannel:
    """A channel that is lost once a job was removed."""

    def __init__(self) -> None:
        self.is_open = True

    def ask(self, op: str, **_: Any) -> list[Any]:
        self.is_open = op != "remove"
        return []


@pytest.fixture
def over_ssh(home: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmOverSsh:
    monkeypatch.setattr(SlurmOverSsh, "_connect", lambda _: LoginChannel())
    return SlurmOverSsh({"OPENENV_SLURM_SSH": "login", "OPENENV_HOME": str(home)})


def test_a_channel_that_is_lost_before_copies_are_removed_stops_nothing(
    over_ssh: SlurmOverSsh,
) -> None:
    def remove_and_list() -> None:
        over_ssh.remove(JOB)
        over_ssh.list()

    thread = threading.Thread(target=remove_and_list, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
