# SPDX-License-Identifier: Apache-2.0
"""Docker Swarm: a service of one task for each replica, placed on any node of the swarm.

    service ──▶ task (pending, …, running, failed) ──▶ container, on this node or another

A service is never rescaled (`replicas=N`), and its task never restarted by Swarm: a replica has an
identity, a port, a log and its turn to be drained, which tasks that come and go do not. More
replicas are more services, and an update is other services beside them.

Ports are published by `mode=host`, on the node that has the task: the ingress mesh, which would
need IPVS in the kernel, and the virtual addresses of services are not used. Swarm cannot publish a
port on one address alone: where the node publishes on all of them, only a server that asks for a
token is started. (`"ip": "127.0.0.1"` in /etc/docker/daemon.json keeps ports on loopback.)

What the task's container did (its exit code, whether it ran out of memory, its output as it comes)
is asked of the container where this node has it. Of another node's, Swarm tells the exit code, and
its output is asked for every second; since it sends no signals there, a server of ours is drained
by a request with a secret that its service has. The task of a node that is down counts as lost:
Swarm would go on to show it as running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from http import HTTPStatus
from typing import ClassVar

import docker
from docker.errors import APIError

from ....system.net.access import is_loopback, new_token, with_token
from ....system.text.json_lines import Json
from ..base import (
    ENV_HOST_LABEL,
    HOME_LABEL,
    Check,
    EngineGone,
    EngineRefused,
    ExitFacts,
    Instance,
    InstanceState,
    Labels,
    LogChunk,
    NameTaken,
    ReplicaPlan,
)
from ..docker.containers import events_of, exit_of
from ..docker.engine import (
    LOG_FILE_SIZE,
    LOG_FILES,
    DockerEngine,
    explained,
    gone_is_fine,
    has_env_host,
    port_inside,
    since,
)
from ..docker.options import host_config
from ..host_options import check_gpus, host_options, served_anywhere, with_host_options
from ..instance_logs import pieces_after
from ..server_answers import ask_to_drain
from .options import container_spec, service_name, split_options

INIT = "docker swarm init --advertise-addr 127.0.0.1"
POLL_INTERVAL_SECONDS = 1.0  # at all services; at a task on another node
NANOSECONDS = 10**9
GPU = "NVIDIA-GPU"  # in the nodes' "node-generic-resources"
_RESOURCE_KINDS = ("DiscreteResourceSpec", "NamedResourceSpec")
_TELL_GPUS = (
    'put {"node-generic-resources": ["NVIDIA-GPU=UUID"]} into /etc/docker/daemon.json of each node '
    "that has some, with the UUIDs that nvidia-smi -a shows"
)
_OVERLAYS_PORTS = "docker_gwbridge"  # publishes the ports of tasks on overlay networks
_BINDING = "com.docker.network.bridge.host_binding_ipv4"
_RUNNING = "running"
_ENDED = frozenset({"complete", "shutdown", "failed", "rejected", "remove", "orphaned"})
_EXPOSED = (
    'ports are published on all addresses: {"ip": "127.0.0.1"} in /etc/docker/daemon.json keeps '
    "them on this machine"
)


class SwarmEngine(DockerEngine):
    """Runs replicas as services of one task."""

    name: ClassVar[str] = "swarm"

    # What there is

    def check(self) -> Check:
        """Tell whether this node is a manager of a swarm."""
        with explained():
            info = self._api.info()
            binding = self._publishes_on("bridge")
        version, swarm = info["ServerVersion"], info["Swarm"]
        if swarm["LocalNodeState"] != "active":
            return Check(version=version, problem="this machine is in no swarm", remedy=INIT)
        if not swarm["ControlAvailable"]:
            problem = "this node is no manager of its swarm"
            remedy = "on a manager: docker node promote NODE"
            return Check(version=version, problem=problem, remedy=remedy)
        return Check(version=version, notes=() if is_loopback(binding) else (_EXPOSED,))

    def list(self) -> Iterable[Instance]:
        """Return every service that carries our labels, by three questions."""
        with explained():
            services = self._api.services(filters={"label": HOME_LABEL})
            found = self._api.tasks(filters={"label": HOME_LABEL})
            down = {node["ID"] for node in self._api.nodes() if _is_down(node)}
        tasks = {task["ServiceID"]: task for task in sorted(found, key=_created_at)}
        labels = ((each, Labels.of(each["Spec"].get("Labels") or {})) for each in services)
        return [
            Instance(
                id=service["ID"],
                labels=whose,
                state=_state_of(service, tasks.get(service["ID"]), down),
            )
            for service, whose in labels
            if whose is not None
        ]

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the service of a replica."""
        name = service_name(plan.name)
        service = self._service(name)
        if service is None:
            return None
        if Labels.of(service["Spec"].get("Labels") or {}) != plan.labels:
            raise NameTaken(f"another service has the name {name}", f"docker service rm {name}")
        with explained():
            return self._of_service(service)

    # Its life

    def start(self, plan: ReplicaPlan) -> Instance:
        """Create a service, which starts its task."""
        found = self.find(plan)
        if found is None:
            with explained():
                self._create_service(plan)
            found = self.find(plan)
        if found is None:
            raise EngineRefused(f"the service {plan.name} was removed while it was started")
        return found

    def signal(self, instance: Instance, number: int) -> None:
        """Send a signal to the task's server; on another node, the one to drain alone."""
        container = self._local_container(instance.id)
        if container is not None:
            with explained(), gone_is_fine():
                self._api.kill(container, signal=number)
        elif number == signal.SIGUSR1:
            self._ask_to_drain(instance)
        else:
            raise EngineRefused("Swarm sends no signals to a container of another node")

    def stop(self, instance: Instance, grace_seconds: float) -> None:
        """Stop the task; its container stays, if this node has it."""
        container = self._local_container(instance.id)
        if container is not None:
            with explained(), gone_is_fine():
                self._api.stop(container, timeout=math.ceil(grace_seconds))
        else:
            self._scale_to_zero(instance.id, grace_seconds)
        self._await_end(instance.id, grace_seconds)

    def remove(self, instance: Instance) -> None:
        """Remove a service, and its task's container, if this node has it."""
        with explained(), gone_is_fine():
            containers = self._containers(instance.id)
            with contextlib.suppress(docker.errors.NotFound):
                self._api.remove_service(instance.id)
        for container in containers:
            with explained(), gone_is_fine():
                self._api.remove_container(container, v=True, force=True)

    # What happens

    def changes(self) -> Iterator[None]:
        """Yield every second: Swarm has no events about the states of tasks."""
        while True:
            time.sleep(POLL_INTERVAL_SECONDS)
            with explained():
                self._api.ping()
            yield None

    def logs(self, instance: Instance, cursor: str | None) -> Iterator[LogChunk]:
        """Yield the output of a service's task."""
        container = self._local_container(instance.id)
        if container is None:
            yield from self._output_elsewhere(instance.id, cursor)
            return
        yield from self.output(container, cursor)
        if self._runs(container):  # which Swarm would learn a moment later
            raise EngineGone("Docker has ended its stream of a container's output")

    # Inside

    def _ask_to_drain(self, instance: Instance) -> None:
        service = self._service(instance.id) or {"Spec": {}}
        env = service["Spec"].get("TaskTemplate", {}).get("ContainerSpec", {}).get("Env") or ()
        options = host_options(dict(each.split("=", 1) for each in env))
        if instance.address is None or options.get("drain_secret") is None:
            raise EngineRefused("its server cannot be told to drain")
        base_url = with_token(instance.address, options.get("token"))
        ask_to_drain(base_url, options["drain_secret"])

    def _service(self, name: str) -> Json | None:
        with explained():
            try:
                return dict(self._api.inspect_service(name))
            except docker.errors.NotFound:
                return None

    def _task(self, service: str) -> Json | None:
        """Return the newest task of a service."""
        try:
            tasks = self._api.tasks(filters={"service": service})
        except docker.errors.NotFound:
            return None
        return max(tasks, key=_created_at, default=None)

    def _down_node(self, task: Json | None) -> tuple[str, ...]:
        """Return the node of a task, if it is down."""
        node = (task or {}).get("NodeID")
        return (node,) if node and _is_down(self._api.inspect_node(node)) else ()

    def _of_service(self, service: Json) -> Instance:
        labels = Labels.of(service["Spec"]["Labels"])
        assert labels is not None
        task = self._task(service["ID"])
        down = self._down_node(task)
        state = _state_of(service, task, down)
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

    def _containers(self, service: str) -> tuple[str, ...]:
        label = f"com.docker.swarm.service.id={service}"
        found = self._api.containers(all=True, filters={"label": label})
        return tuple(container["Id"] for container in found)

    def _local_container(self, service: str) -> str | None:
        with explained():
            container = _container_of(self._task(service))
            return container if container in self._containers(service) else None

    def _runs(self, container: str) -> bool:
        with explained(), contextlib.suppress(docker.errors.NotFound):
            return bool(self._api.inspect_container(container)["State"]["Running"])
        return False

    def _has_ended(self, service: str) -> bool:
        """Whether a service has ended, or was removed."""
        found = self._service(service)
        if found is None:
            return True
        with explained():
            task = self._task(service)
            return _state_of(found, task, self._down_node(task)) is InstanceState.EXITED

    def _await_end(self, service: str, grace_seconds: float) -> None:
        """Wait until Swarm knows that the task has ended."""
        deadline = time.monotonic() + grace_seconds + POLL_INTERVAL_SECONDS * 10
        while not self._has_ended(service) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_SECONDS / 10)

    def _scale_to_zero(self, service: str, grace_seconds: float) -> None:
        found = self._service(service)
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

    def _output_elsewhere(self, service: str, cursor: str | None) -> Iterator[LogChunk]:
        """Yield what a task on another node prints; each second what is new is asked for."""
        options: Json = {"timestamps": True, "stdout": True, "stderr": True, "is_tty": False}
        has_ended = False
        while not has_ended:
            has_ended = self._has_ended(service)
            with explained(), contextlib.suppress(docker.errors.NotFound):  # it was removed
                text = self._api.service_logs(service, **options, **since(cursor))
                for chunk in pieces_after(text, cursor):
                    cursor = chunk.cursor
                    yield chunk
            time.sleep(POLL_INTERVAL_SECONDS)

    def _publishes_on(self, network: str) -> str:
        """Return the address that ports of this node's tasks on a network are published on."""
        found = self._api.inspect_network(network)
        if found["Driver"] == "overlay":
            found = self._api.inspect_network(_OVERLAYS_PORTS)
        # By default, Docker publishes on all addresses.
        return str((found.get("Options") or {}).get(_BINDING) or "0.0.0.0")  # noqa: S104

    def _is_exposed(self, plan: ReplicaPlan) -> bool:
        """Whether others may reach a replica's port; where it will be, further nodes decide."""
        network = plan.options.get("network", "bridge")
        return len(self._api.nodes()) > 1 or not is_loopback(self._publishes_on(network))

    def _resources(self) -> tuple[Json, ...]:
        """Return what each node has that takes tasks."""
        with explained():
            return tuple(
                node["Description"]["Resources"]
                for node in self._api.nodes()
                if node["Status"]["State"] == "ready" and node["Spec"]["Availability"] == "active"
            )

    def _create_service(self, plan: ReplicaPlan) -> None:
        image = self._image_of(plan)
        if plan.gpus:
            check_gpus(plan.gpus, max(map(_gpus_of, self._resources()), default=0), _TELL_GPUS)
        docker_options, placement = split_options(plan.options)
        host, own = host_config(docker_options, sandbox=plan.sandbox)
        if self._is_exposed(plan):
            _check_token(plan, has_env_host=has_env_host(image))
            # From another node it is drained by a request.
            env = with_host_options(served_anywhere(plan.env), drain_secret=new_token())
            plan = dataclasses.replace(plan, env=env)
        port = {
            "Protocol": "tcp",
            "TargetPort": port_inside(plan, image),
            "PublishedPort": plan.port,
            "PublishMode": "host",
        }
        try:
            self._api.create_service(
                {**_template(plan, container_spec(host, own)), **placement},
                name=service_name(plan.name),
                labels={**plan.labels.to_labels(), **_env_host_label(image)},
                mode={"Replicated": {"Replicas": 1}},
                endpoint_spec={"Mode": "dnsrr", "Ports": [port]},
            )
        except APIError as exc:
            if exc.status_code != HTTPStatus.CONFLICT:
                raise  # CONFLICT: another thread or agent was faster


def _template(plan: ReplicaPlan, container: Json) -> Json:
    limits = {
        "NanoCPUs": int((plan.cpus or 0) * NANOSECONDS),
        "MemoryBytes": plan.memory_bytes or 0,
        "Pids": container.pop("Pids", 0),
    }
    reserved: Json = {"MemoryBytes": plan.memory_bytes or 0}
    if plan.gpus:  # as the nodes' "node-generic-resources" name them
        gpu = {"DiscreteResourceSpec": {"Kind": GPU, "Value": plan.gpus}}
        reserved["GenericResources"] = [gpu]
    return {
        "ContainerSpec": {
            "Image": plan.image,
            "Args": list(plan.command) or None,
            "Env": [f"{name}={value}" for name, value in plan.env.items()],
            "Labels": plan.labels.to_labels(),
            "Init": True,
            **container,
        },
        "Resources": {"Limits": limits, "Reservations": reserved},
        "RestartPolicy": {"Condition": "none", "MaxAttempts": 0},
        "LogDriver": {
            "Name": "json-file",
            "Options": {"max-size": LOG_FILE_SIZE, "max-file": LOG_FILES},
        },
    }


def _gpus_of(node: Json) -> int:
    """Return how many GPUs a node has, which are counted, or named one by one."""
    found = 0
    for resource in node.get("GenericResources") or ():
        counted, named = (resource.get(kind) or {} for kind in _RESOURCE_KINDS)
        found += counted["Value"] if counted.get("Kind") == GPU else named.get("Kind") == GPU
    return found


def _env_host_label(image: Json) -> dict[str, str]:
    """Return the label of an image that a service has, too: it is asked more often."""
    version = (image.get("Labels") or {}).get(ENV_HOST_LABEL)
    return {} if version is None else {ENV_HOST_LABEL: version}


def _created_at(task: Json) -> str:
    return str(task["CreatedAt"])


def _is_down(node: Json) -> bool:
    return bool(node["Status"]["State"] == "down")


def _state_of(service: Json, task: Json | None, down: Collection[str]) -> InstanceState:
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


def _check_token(plan: ReplicaPlan, *, has_env_host: bool) -> None:
    """Refuse to publish a server on all addresses that asks nobody for a token."""
    if has_env_host and host_options(plan.env).get("token") is not None:
        return
    text = "Swarm publishes its port on all addresses of the node, and it would ask for no token"
    loopback = 'put {"ip": "127.0.0.1"} into /etc/docker/daemon.json, and restart Docker'
    raise EngineRefused(text, f"launch with --token auto; or {loopback}")
