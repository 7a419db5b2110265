# SPDX-License-Identifier: Apache-2.0
"""When copies of what is launched are removed from a login node, and which."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from openenvd.environments import run_files
from openenvd.environments.engines.base import Instance, InstanceState, Labels, ReplicaPlan
from openenvd.environments.engines.slurm_ssh import SlurmOverSsh
from openenvd.environments.layout import Layout
from openenvd.shim.files import write_json

SECONDS = 10.0
LABELS = Labels("home", "sample", "sample-0-abc", "abc")
OTHER = Instance(
    id="8", labels=replace(LABELS, replica="sample-1-abc"), state=InstanceState.RUNNING
)
JOB = Instance(id="7", labels=LABELS, state=InstanceState.RUNNING)


class LoginChannel:
    """A channel that notes which copies are to be kept, and may be lost once a job was removed.

    Args:
        kept: Where it notes them.
        is_lost: Whether it is lost then.
    """

    def __init__(self, kept: list[list[str]], *, is_lost: bool = False) -> None:
        self.is_open = True
        self._kept = kept
        self._is_lost = is_lost

    def ask(self, op: str, **asked: Any) -> list[Any]:
        if op == "keep_copies":
            self._kept.append(asked["digests"])
        self.is_open = not (op == "remove" and self._is_lost)
        return []

    def instance(self, _: Any) -> Instance:
        return JOB


def over_ssh(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, *channels: LoginChannel
) -> SlurmOverSsh:
    following = iter(channels)
    monkeypatch.setattr(SlurmOverSsh, "_connect", lambda _: next(following))
    return SlurmOverSsh({"OPENENV_SLURM_SSH": "login", "OPENENV_HOME": str(layout.home)})


def test_a_channel_that_is_lost_before_copies_are_removed_stops_nothing(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = LoginChannel([], is_lost=True), LoginChannel([])
    engine = over_ssh(layout, monkeypatch, *channels)

    def remove_and_list() -> None:
        engine.remove(JOB)
        engine.list()

    thread = threading.Thread(target=remove_and_list, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_replica_that_was_started_again_keeps_its_copy_until_its_last_job_is_removed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = layout.run_dir(LABELS.replica)
    run_dir.mkdir(parents=True)
    folder = "/home/user/openenvd/slurm/sources/home/DIGEST/my_env"
    run_file = {
        "version": run_files.RUN_FILE_VERSION,
        "replica_id": LABELS.replica,
        "environment": "sample",
        "ordinal": 0,
        "provider": "slurm",
        "plan": {"folder": folder},
    }
    write_json(str(run_dir / "replica.json"), run_file)
    kept: list[list[str]] = []
    engine = over_ssh(layout, monkeypatch, LoginChannel(kept))
    plan = ReplicaPlan(labels=LABELS, image="", host="127.0.0.1", port=1)
    engine.remove(JOB)  # it has crashed
    engine.start(plan)
    write_json(str(run_dir / "status.json"), {"state": "stopping"})
    engine.remove(OTHER)
    assert kept[-1] == ["DIGEST"]
    engine.remove(JOB)
    assert kept[-1] == []
