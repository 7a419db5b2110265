# SPDX-License-Identifier: Apache-2.0
"""What pods say of themselves, as agents and people are told it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from openenvd.environments.engines.base import ExitFacts, InstanceState, Labels
from openenvd.environments.engines.kubernetes.pods import instance_of

LABELS = Labels(home="0123456789ab", environment="echo", replica="echo-0-7f", generation="7f")
NOW = datetime(2026, 5, 4, 10, 0, tzinfo=UTC)
PLACES = "0/3 nodes are available: 3 Insufficient memory."


def pod(phase: str, state: Any = None, node: str | None = "n1", **status: Any) -> Any:
    statuses = [] if state is None else [{"name": "openenvd", "state": state}]
    return {
        "metadata": {
            "name": "openenvd-echo-0-7f",
            "namespace": "rl",
            "uid": "u-1",
            "annotations": LABELS.to_labels(),
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "openenvd", "ports": [{"containerPort": 8000}]}],
        },
        "status": {"phase": phase, "containerStatuses": statuses, **status},
    }


def waiting(reason: str, message: str = "") -> Any:
    return pod("Pending", {"waiting": {"reason": reason, "message": message}})


def ended(code: int, reason: str = "Error", **more: Any) -> Any:
    return pod("Failed", {"terminated": {"exitCode": code, "reason": reason, **more}})


def test_a_pod_without_a_place_waits_with_the_schedulers_words() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "U", "message": PLACES}
    found = instance_of(pod("Pending", node=None, conditions=[unscheduled]), NOW)
    assert (found.state, found.waiting) == (InstanceState.STARTING, PLACES)
    assert not found.is_on_its_way


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_a_pod_that_nothing_keeps_from_running_is_on_its_way(reason: str) -> None:
    found = instance_of(waiting(reason), NOW)
    assert (found.waiting, found.is_on_its_way) == ("node n1 makes its container", True)


def test_a_warning_is_told_with_what_a_pod_waits_for() -> None:
    found = instance_of(waiting("ContainerCreating"), NOW, "FailedMount: no volume x")
    assert found.waiting == "node n1 makes its container; FailedMount: no volume x"
    assert not found.is_on_its_way


def test_an_image_that_may_come_is_waited_for_and_said() -> None:
    found = instance_of(waiting("ImagePullBackOff", "dial tcp: i/o timeout"), NOW)
    assert found.state is InstanceState.STARTING
    assert found.waiting == "ImagePullBackOff: dial tcp: i/o timeout"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ErrImagePull", "docker.io/library/nothing:1: not found"),
        ("ImagePullBackOff", "pull access denied, repository does not exist"),
        ("ErrImageNeverPull", "Container image is not present with pull policy of Never"),
        ("InvalidImageName", "couldn't parse image name"),
    ],
)
def test_an_image_that_cannot_be_had_is_the_end(reason: str, message: str) -> None:
    found = instance_of(waiting(reason, message), NOW)
    assert found.state is InstanceState.EXITED
    assert found.exit == ExitFacts(error=f"{reason}: {message}")


def test_a_container_that_others_put_into_the_pod_and_that_crashes_is_told() -> None:
    last = {"terminated": {"exitCode": 1, "message": "no route to the mesh"}}
    sidecar = {
        "name": "mesh",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
        "lastState": last,
    }
    found = instance_of(pod("Pending", initContainerStatuses=[sidecar]), NOW)
    assert found.waiting == (
        "CrashLoopBackOff: back-off 5m0s; mesh ended with code 1: no route to the mesh"
    )


@pytest.mark.parametrize(
    ("ip", "address"), [("10.1.2.3", "http://10.1.2.3:8000"), ("fd00::7", "http://[fd00::7]:8000")]
)
def test_a_pod_that_runs_is_reached_at_its_own_address(ip: str, address: str) -> None:
    found = instance_of(pod("Running", {"running": {}}, podIP=ip), NOW)
    assert (found.state, found.address) == (InstanceState.RUNNING, address)


def test_an_exit_has_its_code_and_how_long_it_ran() -> None:
    times = {"startedAt": "2026-05-04T09:00:00Z", "finishedAt": "2026-05-04T09:00:07Z"}
    found = instance_of(ended(3, **times), NOW)
    assert found.state is InstanceState.EXITED
    assert found.exit == ExitFacts(exit_code=3, seconds=7.0)


@pytest.mark.parametrize(("code", "is_oom"), [(137, True), (1, True), (0, False), (143, False)])
def test_memory_is_what_ended_it_only_if_it_did_not_end_well(code: int, is_oom: bool) -> None:
    found = instance_of(ended(code, "OOMKilled"), NOW)
    assert found.exit is not None
    assert found.exit.is_oom is is_oom


def test_a_container_that_cannot_be_started_says_why() -> None:
    found = instance_of(ended(128, "StartError", message='exec: "serve": not found'), NOW)
    assert found.exit == ExitFacts(error='StartError: exec: "serve": not found')


def test_a_pod_that_its_node_has_evicted_says_why() -> None:
    said = {"reason": "Evicted", "message": "The node was low on resource: memory."}
    found = instance_of(pod("Failed", startTime="t", podIP="10.1.2.3", **said), NOW)
    assert found.exit == ExitFacts(evidence="Evicted: The node was low on resource: memory.")


@pytest.mark.parametrize(
    ("code", "reason", "conditions", "exit_"),
    [
        (0, "Completed", [], ExitFacts(ended_by="pod x-1 was deleted: not by openenvd")),
        (
            143,
            "Error",
            [{"type": "DisruptionTarget", "status": "True", "message": "node n1 is drained"}],
            ExitFacts(ended_by="pod x-1 was deleted: node n1 is drained"),
        ),
        (3, "Error", [], ExitFacts(exit_code=3)),
        (
            137,
            "OOMKilled",
            [],
            ExitFacts(exit_code=137, is_oom=True, evidence="pod x-1, OOMKilled"),
        ),
    ],
    ids=["ended in order", "drained", "crashed", "out of memory"],
)
def test_a_pod_that_ends_since_it_is_deleted_says_so(
    code: int, reason: str, conditions: list[Any], exit_: ExitFacts
) -> None:
    gone = ended(code, reason)
    gone["metadata"] |= {"deletionTimestamp": NOW.isoformat(), "name": "x-1"}
    gone["status"]["conditions"] = conditions
    assert instance_of(gone, NOW).exit == exit_


def test_a_pod_whose_node_is_away_is_lost_once_its_end_is_overdue() -> None:
    gone = pod("Running", {"running": {}}, podIP="10.1.2.3")
    due = NOW - timedelta(seconds=5)
    gone["metadata"]["deletionTimestamp"] = due.isoformat().replace("+00:00", "Z")
    assert instance_of(gone, NOW).state is InstanceState.RUNNING
    later = instance_of(gone, NOW + timedelta(seconds=11))
    assert later.state is InstanceState.EXITED
    assert later.exit == ExitFacts(evidence="node n1 does not answer")


@pytest.mark.parametrize(
    ("containers", "reason", "is_lost"),
    [("True", None, True), ("False", None, False), ("True", "ReadinessGatesNotReady", False)],
)
def test_a_node_that_is_away_is_not_given_the_grace_of_its_pods(
    containers: str, reason: str | None, is_lost: bool
) -> None:
    conditions = [
        {"type": "Ready", "status": "False", "reason": reason},
        {"type": "ContainersReady", "status": containers},
    ]
    gone = pod("Running", {"running": {}}, podIP="10.1.2.3", conditions=conditions)
    asked = NOW - timedelta(seconds=20)
    due = asked + timedelta(seconds=3600)
    gone["metadata"] |= {"deletionTimestamp": due.isoformat(), "deletionGracePeriodSeconds": 3600}
    found = instance_of(gone, NOW)
    assert (found.state is InstanceState.EXITED) is is_lost
