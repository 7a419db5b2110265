# SPDX-License-Identifier: Apache-2.0
"""An administrator changes a cluster while a real daemon's sessions are open."""

import subprocess

from ..conftest import eventually
from ..providers.harness import NAME, Harness
from .cluster import NODE, Cluster


def test_a_drained_node_lets_sessions_end_and_the_next_pod_waits_for_another(
    harness: Harness, real: Cluster
) -> None:
    harness.launched("--engine-option", "grace=600")
    with harness.session() as session:
        life = session.ask("life")
        words = ("drain", NODE, "--force", "--ignore-daemonsets", "--delete-emptydir-data")
        with subprocess.Popen([*real.command("kubectl"), *words]) as drain:
            eventually(lambda: "deletionTimestamp" in str(real.pods("openenvd.home")))
            assert session.ask("life") == life
            session.socket.close()
            assert drain.wait(60) == 0
    eventually(lambda: "unschedulable" in str(harness.replica()["message"]))
    real.kubectl("uncordon", NODE)
    eventually(lambda: harness.states() == ["READY"], within=60)
    assert harness.ask("life") != life


def test_status_says_what_a_launch_waits_for(harness: Harness) -> None:
    launch = harness.queued("--memory", "1T")
    eventually(lambda: NAME in harness.names())
    eventually(lambda: "Insufficient memory" in str(harness.environment()["replicas"]))
    harness.machine.ok("cancel", launch)
    harness.assert_nothing_left()
