# SPDX-License-Identifier: Apache-2.0
"""Instances on an engine without a record in this home: its own strays, and others'."""

import shutil

from openenvd.environments.engines.base import Labels
from openenvd.schema.layout import Layout

from ..conftest import eventually
from .harness import NAME, Harness


def strays(harness: Harness) -> list[str]:
    return [stray["replica"] for stray in harness.machine.status()["strays"]]


def test_strays(harness: Harness) -> None:
    """A replica without a record is shown as a stray, and only `down --strays` removes it."""
    harness.launched()
    replica = harness.replica()["id"]
    harness.machine.ok("stop")
    for run_dir in harness.run_dirs():
        shutil.rmtree(run_dir)
    harness.machine.ok("up")
    eventually(lambda: strays(harness) == [replica])
    harness.machine.ok("down", "--all")
    assert len(harness.provider.replicas_of(harness.machine)) == 1
    harness.machine.ok("down", "--strays")
    assert strays(harness) == []
    harness.assert_nothing_left()


def test_labels_of_others(harness: Harness) -> None:
    """Instances without this home's labels are neither shown nor touched."""
    harness.machine.ok("up")  # makes the home
    home = Layout(harness.machine.home).home_label
    labels = Labels("another", NAME, f"{NAME}-0-another", "another").to_labels()
    half = {name: value for name, value in labels.items() if not name.endswith("replica")}
    foreign = [
        harness.provider.start_foreign(f"another-{home}", labels),
        harness.provider.start_foreign(f"half-{home}", {**half, "openenvd.home": home}),
    ]
    harness.launched()
    assert strays(harness) == []
    harness.machine.ok("down", "--all")
    harness.machine.ok("down", "--strays")
    eventually(lambda: len(harness.provider.replicas_of(harness.machine)) == 1)  # the half one
    assert harness.provider.stop_foreign() == foreign


def test_name_taken_by_others(harness: Harness) -> None:
    """A foreign instance with the name of a lost replica is not touched, and status names it."""
    harness.launched()
    name = f"openenvd-{harness.replica()['id']}"
    harness.machine.ok("stop")
    harness.provider.remove_all(harness.machine)
    foreign = harness.provider.start_foreign(name, {})
    harness.machine.ok("up")
    eventually(lambda: f"has the name {name}" in (harness.replica()["message"] or ""))
    harness.machine.ok("down", NAME)
    assert harness.names() == []
    assert harness.provider.stop_foreign() == [foreign]
