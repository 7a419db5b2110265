# SPDX-License-Identifier: Apache-2.0
"""Reads a pod's status: its state, why it waits, how it ended. Pure functions.

Pending                            STARTING; EXITED, if its image can never be pulled
Running                            RUNNING; EXITED, once its container or its node is gone
Succeeded, Failed                  EXITED
"""

from __future__ import annotations

from datetime import datetime

from ....system.net.listening_sockets import http_address
from ....system.text.json_lines import Json
from ..base import EXIT_KILLED, FINE_EXITS, ExitFacts, Instance, InstanceState, Labels
from .options import CONTAINER

LOST_SECONDS = 15.0  # after the time by which a pod should have ended; then it is lost
_DELETED_EXITS = (*FINE_EXITS, EXIT_KILLED)  # of servers of deleted pods
_ORDINARY = frozenset({"ContainerCreating", "PodInitializing"})
_NO_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff"})
_FINAL = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_FINAL_WORDS = ("not found", "denied", "unauthorized", "manifest unknown")  # of registries
_NEVER_RAN = frozenset({"ContainerCannotRun", "StartError"})


def labels_of(pod: Json) -> Labels | None:
    """Return our labels of a pod; None when it is not ours."""
    return Labels.of(pod["metadata"].get("annotations") or {})


def id_of(pod: Json) -> str:
    """Return the id of an instance: no other pod ever has the same."""
    own = pod["metadata"]
    return f"{own['namespace']}/{own['name']}/{own['uid']}"


def instance_of(pod: Json, now: datetime, warning: str | None = None) -> Instance:
    """Return a pod of ours as an instance; `now` is the time by the API server's clock.

    `warning` is the message of an event about it, if it waits.
    """
    labels = labels_of(pod)
    assert labels is not None
    state = state_of(pod, now)
    waiting, blocked_by = None, _blocking_reason(pod)
    if state is InstanceState.STARTING:
        node = pod["spec"].get("nodeName")
        progress = f"node {node} makes its container" if node else "no node has it yet"
        waiting = "; ".join(filter(None, (blocked_by or progress, warning)))
    return Instance(
        id=id_of(pod),
        labels=labels,
        state=state,
        address=address_of(pod) if state is InstanceState.RUNNING else None,
        waiting=waiting,
        is_on_its_way=waiting is not None and blocked_by is None and not warning,
        exit=exit_of(pod) if state is InstanceState.EXITED else None,
    )


def state_of(pod: Json, now: datetime) -> InstanceState:
    """Return the state of a pod."""
    has_ended = pod["status"].get("phase") in ("Succeeded", "Failed")
    if has_ended or _state(pod).get("terminated") or _is_lost(pod, now):
        return InstanceState.EXITED
    if "running" in _state(pod):
        return InstanceState.RUNNING
    return InstanceState.EXITED if _final_problem(pod) else InstanceState.STARTING


def address_of(pod: Json) -> str | None:
    """Return the address of its server: the pod's own, which the whole cluster reaches."""
    ip = pod["status"].get("podIP")
    own: Json = next((c for c in pod["spec"]["containers"] if c["name"] == CONTAINER), {})
    port = (own.get("ports") or [{}])[0].get("containerPort")
    return http_address(ip, port) if ip and port else None


def _blocking_reason(pod: Json) -> str | None:
    """Return what keeps a pod from running, in Kubernetes' words."""
    for each in pod["status"].get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return str(each.get("message") or each.get("reason") or "no node was found for it")
    for status in (*_statuses(pod, "initContainerStatuses"), *_statuses(pod)):
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting and waiting.get("reason") not in _ORDINARY:
            said = f"{waiting.get('reason')}: {waiting.get('message') or 'no more is said'}"
            return said + _last_end(status)
    return None


def is_being_made(pod: Json) -> bool:
    """Return whether a node has the pod, and no container yet: only events say what is wrong."""
    return bool(pod["spec"].get("nodeName")) and not _state(pod).keys() & {"running", "terminated"}


def exit_of(pod: Json) -> ExitFacts:
    """Return how a pod ended whose state is EXITED."""
    if found := _state(pod).get("terminated"):
        return _exit_of_container(pod, found)
    if problem := _final_problem(pod):
        return ExitFacts(error=problem)
    status, said = pod["status"], _message_of(pod)
    if status.get("phase") == "Failed" and said:
        ran = bool(status.get("startTime")) and bool(status.get("podIP"))
        return ExitFacts(evidence=said) if ran else ExitFacts(error=said)
    node = pod["spec"].get("nodeName")
    return ExitFacts(evidence=f"node {node} does not answer" if node else said or None)


def _exit_of_container(pod: Json, found: Json) -> ExitFacts:
    reason, code = found.get("reason"), found.get("exitCode")
    if reason in _NEVER_RAN:
        return ExitFacts(error=f"{reason}: {found.get('message') or 'no more is said'}")
    is_oom = reason == "OOMKilled" and code not in FINE_EXITS
    said = _message_of(pod)
    if is_oom:
        said = f"pod {pod['metadata']['name']}, OOMKilled"
    elif "deletionTimestamp" in pod["metadata"] and code in _DELETED_EXITS:
        # openenvd did not delete it: an instance that we stop is not asked for its exit.
        conditions = pod["status"].get("conditions") or ()
        disruption: Json = next((e for e in conditions if e["type"] == "DisruptionTarget"), {})
        said = disruption.get("message") or disruption.get("reason") or "not by openenvd"
        text = f"pod {pod['metadata']['name']} was deleted: {said}"
        return ExitFacts(ended_by=text, seconds=_seconds_of(found))
    return ExitFacts(
        exit_code=code, is_oom=is_oom, seconds=_seconds_of(found), evidence=said or None
    )


def _message_of(pod: Json) -> str:
    status = pod["status"]
    return ": ".join(filter(None, (status.get("reason"), status.get("message"))))


def _seconds_of(terminated: Json) -> float | None:
    keys = ("startedAt", "finishedAt")
    try:
        began, ended = (datetime.fromisoformat(terminated[key]) for key in keys)
    except (KeyError, TypeError, ValueError):
        return None
    return max(0.0, (ended - began).total_seconds())


def _is_lost(pod: Json, now: datetime) -> bool:
    """Return whether a pod should have ended by now, and its node has not reported that.

    The time of deletion includes the pod's grace period, in which a node that is away ends nothing.
    """
    own = pod["metadata"]
    if own.get("deletionTimestamp") is None:
        return False
    overdue = (now - datetime.fromisoformat(own["deletionTimestamp"])).total_seconds()
    if _node_is_away(pod):
        overdue += own.get("deletionGracePeriodSeconds") or 0
    return overdue > LOST_SECONDS


def _node_is_away(pod: Json) -> bool:
    """Return whether Kubernetes has found the pod's node not ready, as far as the pod shows it.

    A node sets `Ready` according to `ContainersReady` and the pod's own gates. If the node is away,
    the control plane sets only `Ready` to false (`MarkPodsNotReady`).
    """
    conditions = {each["type"]: each for each in pod["status"].get("conditions") or ()}
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    has_gate = ready.get("reason") == "ReadinessGatesNotReady"
    return ready.get("status") == "False" and containers.get("status") == "True" and not has_gate


def _final_problem(pod: Json) -> str | None:
    """Return why its container can never run; None when that is not certain."""
    waiting = _state(pod).get("waiting") or {}
    reason, message = waiting.get("reason"), str(waiting.get("message") or "")
    is_final = reason in _FINAL or (
        reason in _NO_IMAGE and any(words in message.lower() for words in _FINAL_WORDS)
    )
    return f"{reason}: {message}" if is_final else None


def _last_end(status: Json) -> str:
    """Return how a restarted container, which others have added to the pod, last ended."""
    last = (status.get("lastState") or {}).get("terminated")
    if not last:
        return ""
    text = f"; {status['name']} ended with code {last.get('exitCode')}"
    message = (last.get("message") or "").strip()
    return f"{text}: {message}" if message else text


def _statuses(pod: Json, key: str = "containerStatuses") -> list[Json]:
    return list(pod["status"].get(key) or ())


def _state(pod: Json) -> Json:
    """Return the state of our container; empty while there is none."""
    own = (each for each in _statuses(pod) if each["name"] == CONTAINER)
    return next((dict(each.get("state") or {}) for each in own), {})
