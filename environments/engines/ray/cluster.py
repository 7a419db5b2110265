# SPDX-License-Identifier: Apache-2.0
"""Functions that are called in the process that is connected to a Ray cluster (`driver.py`).

    replica:NAME     a record in the cluster's KV, by the agent: labels, name and id of the actor
    report:ACTOR     a report there, by the actor: its address, and its exit (`replica.py`)
    NAME-1f2e3d4c    the actor: detached, in our namespace
    NAME-1f2e3d4c    its placement group: one bundle, in which the replica is placed

The record is written before actor and group are made, and again when the actor's id is known, so
that another agent can make what is missing. Each instance has a name of its own, since a name
becomes free only some time after its actor was killed. Ray never restarts an actor of ours, and
never forgets one: an actor without a record counts as gone.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any
from uuid import uuid4

import ray
from ray import cloudpickle
from ray._private import state as gcs
from ray.exceptions import RayActorError
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....system.text.json_lines import Json
from ..base import EngineGone, EngineRefused
from . import actor as ray_actor
from .replica import NAMESPACE, RECORD, REPORT, delete_key, list_keys, read_key, write_key

ANSWER_SECONDS = 10.0  # for an actor to answer
CONCURRENCY = 8  # calls of an actor at a time

cloudpickle.register_pickle_by_value(ray_actor)


def connect(address: str) -> None:
    """Connect to the cluster whose head answers at an address."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as exc:
        text = f"this machine cannot join the Ray cluster at {address}: {exc}"
        raise EngineGone(text, f"make it a node: ray start --address {address}") from exc


def nodes() -> list[tuple[str, Json]]:
    """Return the addresses and resources of the nodes that are alive."""
    return [(n["NodeManagerAddress"], n["Resources"]) for n in ray.nodes() if n["Alive"]]


def agent_address() -> str:
    """Return the address of the agent's node."""
    return str(ray.util.get_node_ip_address())


def look() -> list[tuple[Json, Json | None, bool]]:
    """Return the record and the report of each instance, and whether its actor lives."""
    own = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
        os._exit(1)  # another cluster has the address by now: the next driver connects to it
    found = map(read_key, list_keys(RECORD))
    records = [record for record in found if record is not None]
    actors = ray.util.list_named_actors(all_namespaces=True)
    living = {each["name"] for each in actors if each["namespace"] == NAMESPACE}
    return [(record, _report(record), record.get("actor_name") in living) for record in records]


def find(name: str) -> Json:
    """Return the record, report, actor and group of one instance, each of which may be None."""
    record = read_key(RECORD.format(name))
    actor, group = None, None
    if record is not None and record.get("actor"):
        actor = _plain_actor(gcs.actors(record["actor"]))
        with contextlib.suppress(ValueError):  # it has no group any more
            known = placement_group_table(get_placement_group(record["actor_name"]))
            group = {"state": known["state"], "bundle": known["bundles"][0]}
            group["scheduling"] = known["stats"]["scheduling_state"]
    report = None if record is None else _report(record)
    return {"record": record, "report": report, "actor": actor, "group": group}


def create(
    name: str, labels: dict[str, str], resources: Json, selector: Json, settings: Json
) -> None:
    """Make the record, group and actor of an instance, or those of them that are missing.

    The actor has `resources` of a node with the labels of the `selector`. `settings` have the plan.
    """
    record = read_key(RECORD.format(name))
    if record is None:
        actor_name = f"{name}-{uuid4().hex[:8]}"
        record = {"name": name, "labels": labels, "actor_name": actor_name}
        write_key(RECORD.format(name), record)
    actor_name = record["actor_name"]
    try:
        group = get_placement_group(actor_name)
    except ValueError:
        options: Json = {"strategy": "STRICT_PACK", "name": actor_name, "lifetime": "detached"}
        if selector:
            options["bundle_label_selector"] = [selector]
        group = placement_group([resources], **options)
    custom = dict(resources)
    actor: Any = (
        ray.remote(ray_actor.ReplicaActor)
        .options(
            name=actor_name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            num_cpus=custom.pop("CPU"),
            num_gpus=custom.pop("GPU", 0),
            memory=custom.pop("memory", None),
            resources=custom or None,
            runtime_env=settings["runtime_env"] or None,
        )
        .remote(settings)
    )
    write_key(RECORD.format(name), record | {"actor": actor._actor_id.hex()})


def ask(name: str, identity: str, method: str, *arguments: Any) -> Any:
    """Return the answer of an instance's actor, or None if the actor is not alive."""
    record = read_key(RECORD.format(name))
    if record is None or record.get("actor") != identity:
        return None
    actor = _handle(record["actor_name"])
    if actor is None:
        return None
    try:
        return ray.get(actor.call.remote(method, *arguments), timeout=ANSWER_SECONDS)
    except RayActorError:
        return None
    except ray.exceptions.GetTimeoutError as exc:
        text = f"the actor {name} has not answered within {ANSWER_SECONDS:g} s"
        raise EngineGone(text, "see whether its node is well: ray status") from exc


def destroy(name: str, labels: dict[str, str]) -> None:
    """Remove an instance, and everything that was made for it: its record last."""
    record = read_key(RECORD.format(name))
    if record is None:
        return
    if record["labels"] != labels:
        raise EngineRefused(f"{name} carries other labels: it belongs to another")
    actor_name, identity = record.get("actor_name", name), record.get("actor")
    actor = _handle(actor_name)
    if actor is not None:
        if identity and gcs.actors(identity).get("State") == "ALIVE":
            with contextlib.suppress(EngineGone):  # it is killed all the same
                ask(name, identity, "close")
        ray.kill(actor)
    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(actor_name))
    if identity:
        delete_key(REPORT.format(identity))
    delete_key(RECORD.format(name))


def _handle(name: str) -> Any:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def _plain_actor(found: Json) -> Json | None:
    if not found:
        return None
    cause = found["DeathCause"]
    kind = cause.WhichOneof("context") if cause is not None else None
    context: Any = getattr(cause, kind) if kind else None
    died = kind == "actor_died_error_context"
    ended_at = found["EndTime"]
    return {
        "state": found["State"],
        "node": found["Address"]["NodeID"],
        "seconds": max(0, ended_at - found["StartTime"]) / 1000 if ended_at else None,
        "cause": kind,
        "reason": type(context).Reason.Name(context.reason) if died else None,
        "message": getattr(context, "error_message", "") if context is not None else "",
    }


def _report(record: Json) -> Json | None:
    actor = record.get("actor")
    return read_key(REPORT.format(actor)) if actor else None
