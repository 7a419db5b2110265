# SPDX-License-Identifier: Apache-2.0
"""Fewer replicas, and other ones, under sessions."""

from __future__ import annotations

from ..conftest import eventually
from .harness import NAME, Harness


def test_scale_down(harness: Harness) -> None:
    """A replica that is taken away finishes its sessions, begins none, and is gone then."""
    harness.launched("--replicas", "2")
    ids = [replica["id"] for replica in harness.environment()["replicas"]]
    with harness.sessions_at(ids) as sessions:
        lives = {each: sessions[each].ask("life") for each in ids}
        harness.machine.ok("scale", NAME, "1", "--async")
        eventually(lambda: "DRAINING" in harness.states(), within=60)
        [kept] = [r["id"] for r in harness.environment()["replicas"] if r["state"] == "READY"]
        assert harness.ask("life") == lives[kept]
        assert {each: sessions[each].ask("life") for each in ids} == lives
    eventually(lambda: harness.states() == ["READY"], within=60)
    eventually(lambda: len(harness.provider.replicas_of(harness.machine)) == 1)
    assert harness.ask("life") == lives[kept]


def test_update(harness: Harness) -> None:
    """A launch of a name that runs replaces its replicas behind the gateway; no session ends."""
    address = harness.launched("--gateway", "-e", "VERSION=1")["address"]
    with harness.session() as session:
        life = session.ask("life")
        assert harness.launched("--gateway", "-e", "VERSION=2")["address"] == address
        assert harness.ask("environ", "VERSION") == "2"
        assert (session.ask("environ", "VERSION"), session.ask("life")) == ("1", life)
    eventually(lambda: harness.states() == ["READY"], within=60)
    eventually(lambda: len(harness.provider.replicas_of(harness.machine)) == 1)
