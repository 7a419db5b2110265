# SPDX-License-Identifier: Apache-2.0
"""Ray: a detached actor in a placement group of its own for each replica.

    agent ──▶ driver process ──▶ GCS ──▶ a node ──▶ the actor ──starts──▶ shim ──▶ env host
      ▲        (Ray's library)    │                    │
      └── records, reports ◀── its KV ◀── address, exit ┘

The actor starts a shim, as each local replica has one, so that limits, exits and drains are the
same as on this machine: Ray itself only counts memory and CPUs. When its server has exited, the
actor stays, with the server's log, until the agent has read the log and removes it.

    options.py    turns plans into requests to Ray; finds the cluster
    driver.py     the process that is connected to the cluster, and the agent's connection to it
    cluster.py    the functions that are called in that process
    actor.py      the actor, as it is sent to its node
    replica.py    the actor's work on its node, and the cluster's KV

Failure cases

    the agent is killed in `start`    the next one finds record, group and actor by their name, and
                                      makes what is missing
    only the shim is lost             it is reported as lost. The same report may come for a moment
                                      when the node is lost
    the agent or its driver ends      actors are detached: nothing ends with their creator
    a node is lost                    Ray declares its actors DEAD, and the daemon starts others. If
                                      the node comes back, its raylet ends, and with it the actors
                                      and their servers
    the head is lost                  without Redis behind it, all actors end with it
    Ray's memory monitor kills        the actor ends, and its server with it: reported as such
    the cluster has no room           the group is PENDING, and `status` names what is missing
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from ....system.process.backoff import backoff_seconds
from ....system.process.exit_reason import Detector, ExitKind
from ....system.text.json_lines import Json
from .. import base
from ..host_options import check_nodes
from .driver import RayDriver
from .options import bundle, options_of

if importlib.util.find_spec("ray") is None:
    raise ImportError("No module named 'ray'")


PACKAGE = Path(__file__).resolve().parents[3]
POLL_INTERVAL_SECONDS = 1.0  # between two looks at the cluster
FIRST_READ_SECONDS, MAX_READ_SECONDS = 0.2, 2.0  # between two looks at a log
END_SECONDS = 0.1  # between two checks whether a replica has ended
KILL_SECONDS = 15.0  # for a shim to end the processes that it kills
_SIGNAL = 128
# States of a placement group for which Ray has not looked for room yet.
_NOT_CONSIDERED = frozenset({"QUEUED", "SCHEDULING_STARTED"})
_DEATHS = {"NODE_DIED": "its node has failed", "RAY_KILL": "its actor was killed (ray.kill)"}
_NO_LIMITS = "Ray counts CPUs but does not limit them: --cpus only chooses a node"


class RayEngine:
    """Runs replicas as detached actors."""

    def __init__(self) -> None:
        self._driver = RayDriver()

    def check(self) -> base.Check:
        with contextlib.closing(RayDriver()) as driver:
            driver.call("nodes")
        return base.Check(version=metadata.version("ray"), notes=(_NO_LIMITS,))

    def list(self) -> Iterable[base.Instance]:
        found = []
        for record, report, lives in self._driver.call("look"):
            labels = base.Labels.of(record.get("labels") or {})
            if labels is not None:
                state = _state(record, report, lives=lives)
                identity = record.get("actor") or record["name"]
                found.append(base.Instance(id=identity, labels=labels, state=state))
        return found

    def find(self, plan: base.ReplicaPlan) -> base.Instance | None:
        found = self._driver.call("find", plan.name)
        record, actor = found["record"], found["actor"]
        if record and record["labels"] != plan.labels.to_labels():
            raise base.NameTaken(f"the record of another replica has the name {plan.name}")
        if record is None or not record.get("actor"):
            return None
        report = found["report"] or {}
        state = _state(record, report, lives=_lives(actor))
        return base.Instance(
            id=record["actor"],
            labels=plan.labels,
            state=state,
            pid=report.get("pid"),
            address=report.get("address"),
            waiting=_why_waiting(found) if state is base.InstanceState.STARTING else None,
            is_on_its_way=(found["group"] or {}).get("scheduling") in _NOT_CONSIDERED,
            exit=_exit_facts(report, actor) if state is base.InstanceState.EXITED else None,
        )

    def start(self, plan: base.ReplicaPlan) -> base.Instance:
        if (found := self.find(plan)) is not None:
            return found
        agent_address = self._driver.call("agent_address")
        nodes = (
            (resources.get("GPU", 0), None if address == agent_address else address)
            for address, resources in self._driver.call("nodes")
        )
        check_nodes(plan, bundle(plan).get("GPU", 0), nodes, "see what nodes have: ray status")
        options = options_of(plan.options)
        settings = {
            "plan": plan.to_json(),
            "package": str(PACKAGE),
            "runtime_env": options.get("runtime-env", {}),
            "agent_address": agent_address,
        }
        selector = options.get("label-selector", {})
        arguments = (plan.labels.to_labels(), bundle(plan), selector, settings)
        self._driver.call("create", plan.name, *arguments)
        return base.require(self.find(plan), plan)

    def signal(self, instance: base.Instance, number: int) -> None:
        self._ask(instance, "signal", number)

    def stop(self, instance: base.Instance, grace_seconds: float) -> None:
        """Stop the server; an instance that has not been placed has none."""
        if self._runs(instance):
            self._ask(instance, "stop", grace_seconds)
        seconds = grace_seconds + KILL_SECONDS
        base.wait_until(lambda: not self._runs(instance), seconds, END_SECONDS)

    def remove(self, instance: base.Instance) -> None:
        """Remove actor, placement group and records; kill the processes that are left."""
        self._driver.call("destroy", _name(instance), instance.labels.to_labels(), seconds=60.0)

    def changes(self) -> Iterator[None]:
        """Yield whenever the state of an instance has changed; Ray has no events about actors."""
        known = None
        while True:
            seen = [(each.id, each.state) for each in self.list()]
            if seen != known:
                known = seen
                yield None
            time.sleep(POLL_INTERVAL_SECONDS)

    def logs(self, instance: base.Instance, cursor: str | None) -> Iterator[base.LogChunk]:
        """Yield the server's output, from its actor; a cursor is an offset."""
        offset, looks = int(cursor or 0), 0
        while (answer := self._ask(instance, "read_log", offset)) is not None:
            data, offset, has_ended = answer
            if data:
                looks = 0
                yield base.LogChunk(data=data, cursor=str(offset))
            elif has_ended:
                return
            else:
                looks += 1
                longest = MAX_READ_SECONDS
                time.sleep(backoff_seconds(looks, first=FIRST_READ_SECONDS, longest=longest))

    def _ask(self, instance: base.Instance, method: str, *arguments: object) -> Any:
        """Return the answer of an instance's actor; None when the actor does not live."""
        return self._driver.call("ask", _name(instance), instance.id, method, *arguments)

    def _runs(self, instance: base.Instance) -> bool:
        found = self._driver.call("find", _name(instance))
        record = found["record"] or {}
        state = _state(record, found["report"], lives=_lives(found["actor"]))
        return record.get("actor") == instance.id and state is base.InstanceState.RUNNING


def _name(instance: base.Instance) -> str:
    return f"openenvd-{instance.labels.replica}"


def _lives(actor: Json | None) -> bool:
    return actor is not None and actor["state"] != "DEAD"


def _state(record: Json, report: Json | None, *, lives: bool) -> base.InstanceState:
    if report and report.get("exit"):
        return base.InstanceState.EXITED
    if record.get("actor") and not lives:
        return base.InstanceState.EXITED
    is_up = report is not None and report.get("port")
    return base.InstanceState.RUNNING if is_up else base.InstanceState.STARTING


def _why_waiting(found: Json) -> str | None:
    """Return why an instance has not been placed; None: it has, and its actor is being started."""
    group = found["group"]
    if group is None or group["state"] != "PENDING":
        return None
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in group["bundle"].items())
    if group["scheduling"] == "INFEASIBLE":
        return f"Ray: no node of the cluster has {wanted} (INFEASIBLE)"
    return f"Ray: waits for a node with {wanted} free ({group['scheduling']})"


def _exit_facts(report: Json, actor: Json | None) -> base.ExitFacts:
    """Return how an instance ended, as its shim reports it, or else as Ray does."""
    reason = report.get("exit")
    if reason is None or reason["kind"] == ExitKind.LOST:
        return _by_ray(actor or {"state": "DEAD"})
    if reason.get("exit_code") is not None and not reason.get("pid"):
        return base.ExitFacts(error=reason.get("evidence") or "its server cannot be started")
    number = reason.get("signal_number")
    code = reason.get("exit_code") if number is None else _SIGNAL + number
    return base.ExitFacts(exit_code=code, reason=reason if reason.get("pid") else None)


def _by_ray(actor: Json) -> base.ExitFacts:
    """Return how an actor ended, as Ray reports it; its shim has not reported an exit."""
    said = " ".join(str(actor.get("message") or "").split())
    where = f"node {actor['node'][:12]}" if actor.get("node") else "no node"
    if _lives(actor):  # the shim was killed, or Ray has not noticed yet that the node is lost
        return base.ExitFacts(ended_by=f"its shim has ended on {where}")
    match actor.get("cause"):
        case "oom_context":
            return base.ExitFacts(
                is_oom=True,
                detector=Detector.RAY,
                seconds=actor["seconds"],
                evidence=f"{where}: {said}" if said else where,
            )
        case "creation_task_failure_context" | "runtime_env_failed_context":
            return base.ExitFacts(error=f"its actor cannot be started: {said or actor['cause']}")
        case "actor_unschedulable_context":
            return base.ExitFacts(error=f"Ray cannot place it: {said}")
    reason = actor.get("reason") or "unknown"
    text = _DEATHS.get(reason, f"its actor has died ({reason}: {said})")
    return base.ExitFacts(ended_by=f"{text} on {where}", seconds=actor.get("seconds"))
