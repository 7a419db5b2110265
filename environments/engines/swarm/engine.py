# SPDX-License-Identifier: Apache-2.0
"""Docker Swarm: a service of one task for each replica, placed on any node of the swarm.

    service ──▶ task (pending, …, running, failed) ──▶ container, on this node or another

A service is never rescaled (`replicas=N`), and Swarm never restarts its task, because a replica
keeps its identity, port and log, and has to finish its drain. More replicas are more services.

Ports are published by `mode=host`, on the node that has the task, without the ingress mesh, which
would need IPVS in the kernel. Swarm cannot publish a port on a single address: on a node that
publishes ports on all addresses, only a server that requires a token is started.

For a container on this node, Docker reports the exit code, a lack of memory, and the output as it
comes. For a container on another node, Swarm reports the exit code, and is asked for the output
every second. Swarm sends no signals there, so a server of ours is drained by a request with a
secret from its service. The task of a node that is down counts as lost, although Swarm still shows
it as running.

service ──▶ its newest task ──▶ node (down?), container (on this node?) ──▶ Instance
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

import docker

from ....schema.errors import NotAnswering
from ....schema.protocol import DRAIN_HEADER, DRAIN_ROUTE, LOOPBACK
from ....system.net.access import is_loopback, new_token, with_token
from ....system.text.json_lines import Json
from ...access import ask
from .. import base
from ..docker import engine
from ..docker.options import host_config
from ..host_options import check_gpus, host_options, served_anywhere, with_host_options
from ..instance_logs import pieces_after
from .options import container_spec, service_name, split_options

DRAIN_SECONDS = 5.0  # for a server to answer that it drains
POLL_INTERVAL_SECONDS = 1.0  # between two looks at all services, or at a task on another node
NANOSECONDS = 10**9
_OVERLAYS_PORTS = "docker_gwbridge"  # the network that publishes ports of overlay networks
_BINDING = "com.docker.network.bridge.host_binding_ipv4"
_RUNNING = "running"
_ENDED = frozenset({"complete", "shutdown", "failed", "rejected", "remove", "orphaned"})
INIT = "docker swarm init --advertise-addr 127.0.0.1"
GPU = "NVIDIA-GPU"  # in the nodes' "node-generic-resources"
_RESOURCE_KINDS = ("DiscreteResourceSpec", "NamedResourceSpec")
_DECLARE = '{"node-generic-resources": ["NVIDIA-GPU=UUID"]} in /etc/docker/daemon.json'
_DECLARE_GPUS = f"declare a node's GPUs, by the UUIDs that nvidia-smi -a shows: {_DECLARE}"
_PUBLISHED = "its port is published on all the node's addresses, and its server asks for no token"
_ON_LOOPBACK = 'put {"ip": "127.0.0.1"} into /etc/docker/daemon.json, and restart Docker'
_EXPOSED = f"ports are published on all addresses: {_ON_LOOPBACK}"


class SwarmEngine(engine.DockerEngine):
    """Runs replicas as services of one task."""

    @cached_property
    def _services(self) -> Services:
        return Services(self._api)

    def check(self) -> base.Check:
        """Check whether this node is a manager of a swarm."""
        with engine.explained():
            info = self._api.info()
            binding = self._services.publishing_address("bridge")
        problem, remedy = None, None
        if info["Swarm"]["LocalNodeState"] != "active":
            problem, remedy = "this machine is in no swarm", INIT
        elif not info["Swarm"]["ControlAvailable"]:
            problem = "this node is no manager of its swarm"
            remedy = "on a manager: docker node promote NODE"
        notes = () if problem or is_loopback(binding) else (_EXPOSED,)
        version = info["ServerVersion"]
        return base.Check(version=version, problem=problem, remedy=remedy, notes=notes)

    def list(self) -> Iterable[base.Instance]:
        with engine.explained():
            services = self._api.services(filters={"label": base.HOME_LABEL})
            found = self._api.tasks(filters={"label": base.HOME_LABEL})
            down = {node["ID"] for node in self._api.nodes() if is_down(node)}
        tasks = {task["ServiceID"]: task for task in sorted(found, key=created_at)}
        return [
            base.Instance(
                id=service["ID"],
                labels=whose,
                state=state_of(service, tasks.get(service["ID"]), down),
            )
            for service in services
            if (whose := base.Labels.of(service["Spec"].get("Labels"))) is not None
        ]

    def find(self, plan: base.ReplicaPlan) -> base.Instance | None:
        name = service_name(plan.name)
        service = self._services.find(name)
        if service is None:
            return None
        if base.Labels.of(service["Spec"].get("Labels")) != plan.labels:
            problem = f"another service has the name {name}"
            raise base.NameTaken(problem, f"docker service rm {name}")
        with engine.explained():
            return self._services.instance(service)

    def start(self, plan: base.ReplicaPlan) -> base.Instance:
        with engine.explained():
            return self._find_or_create(plan)

    def signal(self, instance: base.Instance, number: int) -> None:
        """Send a signal to the task's server; on another node, only the signal to drain."""
        container = self._services.local_container(instance.id)
        if container is not None:
            with engine.explained(), engine.gone_is_fine():
                self._api.kill(container, signal=number)
        elif number == signal.SIGUSR1:
            self._ask_to_drain(instance)
        else:
            raise base.EngineRefused("Swarm sends no signals to a container of another node")

    def stop(self, instance: base.Instance, grace_seconds: float) -> None:
        """Stop the task; its container stays, if it is on this node."""
        container = self._services.local_container(instance.id)
        if container is not None:
            with engine.explained(), engine.gone_is_fine():
                self._api.stop(container, timeout=math.ceil(grace_seconds))
        else:
            self._services.scale_to_zero(instance.id, grace_seconds)
        seconds, pause = grace_seconds + POLL_INTERVAL_SECONDS * 10, POLL_INTERVAL_SECONDS / 10
        base.wait_until(lambda: self._services.has_ended(instance.id), seconds, pause)

    def remove(self, instance: base.Instance) -> None:
        """Remove a service, and its task's container, if it is on this node."""
        with engine.explained(), engine.gone_is_fine():
            containers = self._services.containers(instance.id)
            with contextlib.suppress(docker.errors.NotFound):
                self._api.remove_service(instance.id)
        for container in containers:
            with engine.explained(), engine.gone_is_fine():
                self._api.remove_container(container, v=True, force=True)

    def changes(self) -> Iterator[None]:
        """Yield every second; Swarm has no events about the states of tasks."""
        while True:
            time.sleep(POLL_INTERVAL_SECONDS)
            with engine.explained():
                self._api.ping()
            yield None

    def logs(self, instance: base.Instance, cursor: str | None) -> Iterator[base.LogChunk]:
        container = self._services.local_container(instance.id)
        if container is None:
            return self._output_elsewhere(instance.id, cursor)
        return self.output(container, cursor)

    def _ask_to_drain(self, instance: base.Instance) -> None:
        service = self._services.find(instance.id) or {"Spec": {}}
        env = service["Spec"].get("TaskTemplate", {}).get("ContainerSpec", {}).get("Env") or ()
        options = host_options(dict(each.split("=", 1) for each in env))
        if instance.address is None or options.get("drain_secret") is None:
            raise base.EngineRefused("its server cannot be drained")
        headers = {"Host": LOOPBACK, DRAIN_HEADER: options["drain_secret"]}
        base_url = with_token(instance.address, options.get("token"))
        try:
            ask(base_url, DRAIN_ROUTE, DRAIN_SECONDS, method="POST", headers=headers)
        except NotAnswering as exc:
            if exc.may_pass:
                raise
            raise base.EngineRefused(exc.message) from exc

    def _output_elsewhere(self, service: str, cursor: str | None) -> Iterator[base.LogChunk]:
        """Yield the output of a task on another node, which is requested every second."""
        options: Json = {"timestamps": True, "stdout": True, "stderr": True, "is_tty": False}
        has_ended = False
        while not has_ended:
            has_ended = self._services.has_ended(service)
            with engine.explained(), contextlib.suppress(docker.errors.NotFound):  # it was removed
                text = self._api.service_logs(service, **options, **engine.since(cursor))
                for chunk in pieces_after(text, cursor):
                    cursor = chunk.cursor
                    yield chunk
            time.sleep(POLL_INTERVAL_SECONDS)

    def _create(self, plan: base.ReplicaPlan) -> None:
        image = self._image_of(plan)
        if plan.gpus:
            most = max(map(_gpus_of, self._services.node_resources()), default=0)
            check_gpus(plan.gpus, most, _DECLARE_GPUS)
        docker_options, placement = split_options(plan.options)
        host, own = host_config(docker_options, sandbox=plan.sandbox)
        if self._services.is_exposed(plan):
            if not engine.has_env_host(image) or host_options(plan.env).get("token") is None:
                raise base.EngineRefused(_PUBLISHED, f"launch with --token auto; or {_ON_LOOPBACK}")
            # On another node it is drained by a request.
            env = with_host_options(served_anywhere(plan.env), drain_secret=new_token())
            plan = dataclasses.replace(plan, env=env)
        port = {
            "Protocol": "tcp",
            "TargetPort": engine.port_inside(image),
            "PublishedPort": plan.port,
            "PublishMode": "host",
        }
        labels = plan.labels.to_labels()
        if version := (image.get("Labels") or {}).get(base.ENV_HOST_LABEL):
            labels[base.ENV_HOST_LABEL] = version  # so that its image need not be inspected again
        self._api.create_service(
            {**_template(plan, container_spec(host, own)), **placement},
            name=service_name(plan.name),
            labels=labels,
            mode={"Replicated": {"Replicas": 1}},
            endpoint_spec={"Mode": "dnsrr", "Ports": [port]},
        )


def _template(plan: base.ReplicaPlan, container: Json) -> Json:
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
            "Options": {"max-size": engine.LOG_FILE_SIZE, "max-file": engine.LOG_FILES},
        },
    }


def _gpus_of(node: Json) -> int:
    """Return how many GPUs a node has; they are declared as a number, or one by one."""
    found = 0
    for resource in node.get("GenericResources") or ():
        counted, named = (resource.get(kind) or {} for kind in _RESOURCE_KINDS)
        found += counted["Value"] if counted.get("Kind") == GPU else named.get("Kind") == GPU
    return found


class Services:
    """The services of the swarm to which a Docker API belongs."""

    def __init__(self, api: docker.APIClient) -> None:
        self._api = api

    def find(self, name: str) -> Json | None:
        """Return a service by its name or id."""
        with engine.explained():
            try:
                return dict(self._api.inspect_service(name))
            except docker.errors.NotFound:
                return None

    def instance(self, service: Json) -> base.Instance:
        """Return a service as an instance."""
        labels = base.Labels.of(service["Spec"]["Labels"])
        assert labels is not None
        task = self._task(service["ID"])
        down = self._down_node(task)
        state = state_of(service, task, down)
        if task is None:
            known = base.ExitFacts() if state is base.InstanceState.EXITED else None
            return base.Instance(id=service["ID"], labels=labels, state=state, exit=known)
        status, waits = task["Status"], state is base.InstanceState.STARTING
        return base.Instance(
            id=service["ID"],
            labels=labels,
            state=state,
            pid=(status.get("ContainerStatus") or {}).get("PID") or None,
            address=self._address_of(service, task),
            waiting=(status.get("Err") or status.get("Message")) if waits else None,
            is_on_its_way=waits and not status.get("Err"),
            drains=base.ENV_HOST_LABEL in service["Spec"]["Labels"],
            exit=self._exit(task, down) if state is base.InstanceState.EXITED else None,
        )

    def local_container(self, service: str) -> str | None:
        """Return the container of a service's task, if it is on this node."""
        with engine.explained():
            status = (self._task(service) or {}).get("Status") or {}
            container = (status.get("ContainerStatus") or {}).get("ContainerID")
            return container if container in self.containers(service) else None

    def containers(self, service: str) -> tuple[str, ...]:
        """Return the containers of a service on this node, including those that have ended."""
        label = f"com.docker.swarm.service.id={service}"
        found = self._api.containers(all=True, filters={"label": label})
        return tuple(container["Id"] for container in found)

    def has_ended(self, service: str) -> bool:
        """Return whether a service has ended, or was removed."""
        found = self.find(service)
        if found is None:
            return True
        with engine.explained():
            task = self._task(service)
            return state_of(found, task, self._down_node(task)) is base.InstanceState.EXITED

    def scale_to_zero(self, service: str, grace_seconds: float) -> None:
        """Make Swarm end a service's task, wherever it runs."""
        found = self.find(service)
        if found is None:
            return
        spec = found["Spec"]
        template = spec["TaskTemplate"]
        template["ContainerSpec"]["StopGracePeriod"] = int(grace_seconds * NANOSECONDS)
        with engine.explained(), engine.gone_is_fine():
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
        """Return the address on which this node publishes ports of tasks on a network."""
        found = self._api.inspect_network(network)
        if found["Driver"] == "overlay":
            found = self._api.inspect_network(_OVERLAYS_PORTS)
        # By default, Docker publishes on all addresses.
        return str((found.get("Options") or {}).get(_BINDING) or "0.0.0.0")  # noqa: S104

    def is_exposed(self, plan: base.ReplicaPlan) -> bool:
        """Return whether others can reach a replica's port on any node that may run it."""
        network = plan.options.get("network", "bridge")
        return len(self._api.nodes()) > 1 or not is_loopback(self.publishing_address(network))

    def node_resources(self) -> tuple[Json, ...]:
        """Return the resources of each node that takes tasks."""
        with engine.explained():
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
        node = (task or {}).get("NodeID")
        return (node,) if node and is_down(self._api.inspect_node(node)) else ()

    def _exit(self, task: Json, down: Collection[str]) -> base.ExitFacts:
        status = task["Status"]
        if down and status["State"] not in _ENDED:
            return base.ExitFacts(evidence=f"node {task['NodeID']} is down")
        container = status.get("ContainerStatus") or {}
        if identity := container.get("ContainerID"):
            with contextlib.suppress(docker.errors.NotFound):
                found = self._api.inspect_container(identity)
                return engine.exit_of(found, engine.events_of(self._api, found))
        if status["State"] == "rejected" or not identity:
            return base.ExitFacts(error=status.get("Err") or f"its task was {status['State']}")
        return base.ExitFacts(exit_code=container.get("ExitCode"), evidence=status.get("Err"))

    def _address_of(self, service: Json, task: Json) -> str | None:
        """Return the address of a task on another node; None: it is on this node."""
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


def state_of(service: Json, task: Json | None, down: Collection[str]) -> base.InstanceState:
    """Return the state of a service, by its newest task and the nodes that are down."""
    if task is None:  # it has not been made yet, or the service is stopped
        is_stopped = service["Spec"]["Mode"]["Replicated"]["Replicas"] == 0
        return base.InstanceState.EXITED if is_stopped else base.InstanceState.STARTING
    state = task["Status"]["State"]
    if task.get("NodeID") in down:
        return base.InstanceState.EXITED
    if state == _RUNNING:
        return base.InstanceState.RUNNING
    return base.InstanceState.EXITED if state in _ENDED else base.InstanceState.STARTING
