# SPDX-License-Identifier: Apache-2.0
"""Services of a swarm, their tasks and nodes: Swarm's answers, and those of this node's Docker.

service ──▶ its newest task ──▶ node (down?), container (on this node?) ──▶ Instance
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection

import docker

from ....system.net.access import is_loopback
from ....system.text.json_lines import Json
from ..base import (
    ENV_HOST_LABEL,
    ExitFacts,
    Instance,
    InstanceState,
    Labels,
    ReplicaPlan,
)
from ..docker.containers import events_of, exit_of
from ..docker.engine import explained, gone_is_fine

POLL_INTERVAL_SECONDS = 1.0  # at all services; at a task on another node
NANOSECONDS = 10**9
_OVERLAYS_PORTS = "docker_gwbridge"  # publishes the ports of tasks on overlay networks
_BINDING = "com.docker.network.bridge.host_binding_ipv4"
_RUNNING = "running"
_ENDED = frozenset({"complete", "shutdown", "failed", "rejected", "remove", "orphaned"})


class Services:
    """The services of the swarm that a Docker API belongs to."""

    def __init__(self, api: docker.APIClient) -> None:
        self._api = api

    def find(self, name: str) -> Json | None:
        """Return a service by its name or id."""
        with explained():
            try:
                return dict(self._api.inspect_service(name))
            except docker.errors.NotFound:
                return None

    def instance(self, service: Json) -> Instance:
        """Return a service as the agent is to see it."""
        labels = Labels.of(service["Spec"]["Labels"])
        assert labels is not None
        task = self._task(service["ID"])
        down = self._down_node(task)
        state = state_of(service, task, down)
        if task is None:
            known = ExitFacts() if state is InstanceState.EXITED else None
            return Instance(id=service["ID"], labels=labels, state=state, exit=known)
        status, waits = task["Status"], state is InstanceState.STARTING
        return Instance(
            id=service["ID"],
            labels=labels,
            state=state,
            pid=(status.get("ContainerStatus") or {}).get("PID") or None,
            address=self._address_of(service, task),
            waiting=(status.get("Err") or status.get("Message")) if waits else None,
            is_on_its_way=waits and not status.get("Err"),
            drains=ENV_HOST_LABEL in service["Spec"]["Labels"],
            exit=self._exit(task, down) if state is InstanceState.EXITED else None,
        )

    def local_container(self, service: str) -> str | None:
        """Return the container of a service's task, if this node has it."""
        with explained():
            container = _container_of(self._task(service))
            return container if container in self.containers(service) else None

    def containers(self, service: str) -> tuple[str, ...]:
        """Return the containers of a service on this node, ended ones included."""
        label = f"com.docker.swarm.service.id={service}"
        found = self._api.containers(all=True, filters={"label": label})
        return tuple(container["Id"] for container in found)

    def runs(self, container: str) -> bool:
        """Return whether a container of this node runs."""
        with explained(), contextlib.suppress(docker.errors.NotFound):
            return bool(self._api.inspect_container(container)["State"]["Running"])
        return False

    def has_ended(self, service: str) -> bool:
        """Return whether a service has ended, or was removed."""
        found = self.find(service)
        if found is None:
            return True
        with explained():
            task = self._task(service)
            return state_of(found, task, self._down_node(task)) is InstanceState.EXITED

    def wait_for_end(self, service: str, grace_seconds: float) -> None:
        """Wait until Swarm knows that the task has ended."""
        deadline = time.monotonic() + grace_seconds + POLL_INTERVAL_SECONDS * 10
        while not self.has_ended(service) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_SECONDS / 10)

    def scale_to_zero(self, service: str, grace_seconds: float) -> None:
        """Make Swarm end a service's task, wherever it runs."""
        found = self.find(service)
        if found is None:
            return
        spec = found["Spec"]
        template = spec["TaskTemplate"]
        template["ContainerSpec"]["StopGracePeriod"] = int(grace_seconds * NANOSECONDS)
        with explained(), gone_is_fine():
            self._api.update_service(
                found["ID"],
                version=found["Version"]["Index"],
                task_template=template,
                name=spec["Name"],
                labels=spec["Labels"],
                mode={"Replicated": {"Replicas": 0}},
                endpoint_spec=spec["EndpointSpec"],
            )

    def publishing_address(self, network: str) -> str:
        """Return the address that ports of this node's tasks on a network are published on."""
        found = self._api.inspect_network(network)
        if found["Driver"] == "overlay":
            found = self._api.inspect_network(_OVERLAYS_PORTS)
        # By default, Docker publishes on all addresses.
        return str((found.get("Options") or {}).get(_BINDING) or "0.0.0.0")  # noqa: S104

    def is_exposed(self, plan: ReplicaPlan) -> bool:
        """Return whether others may reach a replica's port, on whichever node it will be."""
        network = plan.options.get("network", "bridge")
        return len(self._api.nodes()) > 1 or not is_loopback(self.publishing_address(network))

    def node_resources(self) -> tuple[Json, ...]:
        """Return the resources of each node that takes tasks."""
        with explained():
            return tuple(
                node["Description"]["Resources"]
                for node in self._api.nodes()
                if node["Status"]["State"] == "ready" and node["Spec"]["Availability"] == "active"
            )

    def _task(self, service: str) -> Json | None:
        """Return the newest task of a service."""
        try:
            tasks = self._api.tasks(filters={"service": service})
        except docker.errors.NotFound:
            return None
        return max(tasks, key=created_at, default=None)

    def _down_node(self, task: Json | None) -> tuple[str, ...]:
        """Return the node of a task, if it is down."""
        node = (task or {}).get("NodeID")
        return (node,) if node and is_down(self._api.inspect_node(node)) else ()

    def _exit(self, task: Json, down: Collection[str]) -> ExitFacts:
        status = task["Status"]
        if down and status["State"] not in _ENDED:
            return ExitFacts(evidence=f"node {task['NodeID']} is down")
        container = status.get("ContainerStatus") or {}
        if identity := container.get("ContainerID"):
            with contextlib.suppress(docker.errors.NotFound):
                found = self._api.inspect_container(identity)
                return exit_of(found, events_of(self._api, found))
        if status["State"] == "rejected" or not identity:
            return ExitFacts(error=status.get("Err") or f"its task was {status['State']}")
        return ExitFacts(exit_code=container.get("ExitCode"), evidence=status.get("Err"))

    def _address_of(self, service: Json, task: Json) -> str | None:
        """Return the address of a task on another node."""
        node = task.get("NodeID")
        if not node or node == self._api.info()["Swarm"]["NodeID"]:
            return None
        host = self._api.inspect_node(node)["Status"]["Addr"]
        port = service["Spec"]["EndpointSpec"]["Ports"][0]["PublishedPort"]
        return f"http://{host}:{port}"


def created_at(task: Json) -> str:
    """Return when a task was created; later times compare greater."""
    return str(task["CreatedAt"])


def is_down(node: Json) -> bool:
    """Return whether Swarm has lost a node."""
    return bool(node["Status"]["State"] == "down")


def state_of(service: Json, task: Json | None, down: Collection[str]) -> InstanceState:
    """Return how far a service is, from its newest task and the nodes that are down."""
    if task is None:  # not made yet, or stopped
        is_stopped = service["Spec"]["Mode"]["Replicated"]["Replicas"] == 0
        return InstanceState.EXITED if is_stopped else InstanceState.STARTING
    state = task["Status"]["State"]
    if task.get("NodeID") in down:
        return InstanceState.EXITED
    if state == _RUNNING:
        return InstanceState.RUNNING
    return InstanceState.EXITED if state in _ENDED else InstanceState.STARTING


def _container_of(task: Json | None) -> str | None:
    status = {} if task is None else task["Status"]
    return (status.get("ContainerStatus") or {}).get("ContainerID") or None
