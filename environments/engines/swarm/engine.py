# SPDX-License-Identifier: Apache-2.0
"""Docker Swarm: a service of one task for each replica, placed on any node of the swarm.

    service ──▶ task (pending, …, running, failed) ──▶ container, on this node or another

A service is never rescaled (`replicas=N`), and Swarm never restarts its task: a replica has an
identity, a port, a log and a time to be drained, which tasks that come and go do not have. More
replicas are more services; an update starts other services beside them.

Ports are published by `mode=host`, on the node that has the task: the ingress mesh, which would
need IPVS in the kernel, and the virtual addresses of services are not used. Swarm cannot publish a
port on one address alone: where the node publishes on all of them, only a server that asks for a
token is started. (`"ip": "127.0.0.1"` in /etc/docker/daemon.json keeps ports on loopback.)

A container of this node is asked itself for its exit code, whether it ran out of memory, and its
output as it comes. For a container of another node, Swarm reports the exit code, and its output is
asked for every second. Swarm sends no signals there, so a server of ours is drained by a request
with a secret that its service has. The task of a node that is down counts as lost: Swarm would
still show it as running.

    engine.py   the engine; options.py: its options as Swarm's; services.py: what Swarm knows
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
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
    Instance,
    Labels,
    LogChunk,
    NameTaken,
    ReplicaPlan,
)
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
from .services import NANOSECONDS, POLL_INTERVAL_SECONDS, Services, created_at, is_down, state_of

INIT = "docker swarm init --advertise-addr 127.0.0.1"
GPU = "NVIDIA-GPU"  # in the nodes' "node-generic-resources"
_RESOURCE_KINDS = ("DiscreteResourceSpec", "NamedResourceSpec")
_DECLARE_GPUS = (
    'put {"node-generic-resources": ["NVIDIA-GPU=UUID"]} into /etc/docker/daemon.json of each node '
    "that has some, with the UUIDs that nvidia-smi -a shows"
)
_EXPOSED = (
    'ports are published on all addresses: {"ip": "127.0.0.1"} in /etc/docker/daemon.json keeps '
    "them on this machine"
)


class SwarmEngine(DockerEngine):
    """Runs replicas as services of one task."""

    name: ClassVar[str] = "swarm"

    @cached_property
    def _services(self) -> Services:
        return Services(self._api)

    def check(self) -> Check:
        """Check whether this node is a manager of a swarm."""
        with explained():
            info = self._api.info()
            binding = self._services.publishing_address("bridge")
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
            down = {node["ID"] for node in self._api.nodes() if is_down(node)}
        tasks = {task["ServiceID"]: task for task in sorted(found, key=created_at)}
        labels = ((each, Labels.of(each["Spec"].get("Labels") or {})) for each in services)
        return [
            Instance(
                id=service["ID"],
                labels=whose,
                state=state_of(service, tasks.get(service["ID"]), down),
            )
            for service, whose in labels
            if whose is not None
        ]

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the service of a replica."""
        name = service_name(plan.name)
        service = self._services.find(name)
        if service is None:
            return None
        if Labels.of(service["Spec"].get("Labels") or {}) != plan.labels:
            raise NameTaken(f"another service has the name {name}", f"docker service rm {name}")
        with explained():
            return self._services.instance(service)

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
        container = self._services.local_container(instance.id)
        if container is not None:
            with explained(), gone_is_fine():
                self._api.kill(container, signal=number)
        elif number == signal.SIGUSR1:
            self._ask_to_drain(instance)
        else:
            raise EngineRefused("Swarm sends no signals to a container of another node")

    def stop(self, instance: Instance, grace_seconds: float) -> None:
        """Stop the task; its container stays, if this node has it."""
        container = self._services.local_container(instance.id)
        if container is not None:
            with explained(), gone_is_fine():
                self._api.stop(container, timeout=math.ceil(grace_seconds))
        else:
            self._services.scale_to_zero(instance.id, grace_seconds)
        self._services.wait_for_end(instance.id, grace_seconds)

    def remove(self, instance: Instance) -> None:
        """Remove a service, and its task's container, if this node has it."""
        with explained(), gone_is_fine():
            containers = self._services.containers(instance.id)
            with contextlib.suppress(docker.errors.NotFound):
                self._api.remove_service(instance.id)
        for container in containers:
            with explained(), gone_is_fine():
                self._api.remove_container(container, v=True, force=True)

    def changes(self) -> Iterator[None]:
        """Yield every second: Swarm has no events about the states of tasks."""
        while True:
            time.sleep(POLL_INTERVAL_SECONDS)
            with explained():
                self._api.ping()
            yield None

    def logs(self, instance: Instance, cursor: str | None) -> Iterator[LogChunk]:
        """Yield the output of a service's task."""
        container = self._services.local_container(instance.id)
        if container is None:
            yield from self._output_elsewhere(instance.id, cursor)
            return
        yield from self.output(container, cursor)
        if self._services.runs(container):  # which Swarm would learn a moment later
            raise EngineGone("Docker has ended its stream of a container's output")

    def _ask_to_drain(self, instance: Instance) -> None:
        service = self._services.find(instance.id) or {"Spec": {}}
        env = service["Spec"].get("TaskTemplate", {}).get("ContainerSpec", {}).get("Env") or ()
        options = host_options(dict(each.split("=", 1) for each in env))
        if instance.address is None or options.get("drain_secret") is None:
            raise EngineRefused("its server cannot be drained")
        base_url = with_token(instance.address, options.get("token"))
        ask_to_drain(base_url, options["drain_secret"])

    def _output_elsewhere(self, service: str, cursor: str | None) -> Iterator[LogChunk]:
        """Yield what a task on another node prints; each second what is new is asked for."""
        options: Json = {"timestamps": True, "stdout": True, "stderr": True, "is_tty": False}
        has_ended = False
        while not has_ended:
            has_ended = self._services.has_ended(service)
            with explained(), contextlib.suppress(docker.errors.NotFound):  # it was removed
                text = self._api.service_logs(service, **options, **since(cursor))
                for chunk in pieces_after(text, cursor):
                    cursor = chunk.cursor
                    yield chunk
            time.sleep(POLL_INTERVAL_SECONDS)

    def _create_service(self, plan: ReplicaPlan) -> None:
        image = self._image_of(plan)
        if plan.gpus:
            check_gpus(
                plan.gpus,
                max(map(_gpus_of, self._services.node_resources()), default=0),
                _DECLARE_GPUS,
            )
        docker_options, placement = split_options(plan.options)
        host, own = host_config(docker_options, sandbox=plan.sandbox)
        if self._services.is_exposed(plan):
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


def _check_token(plan: ReplicaPlan, *, has_env_host: bool) -> None:
    """Refuse to publish a server on all addresses that asks for no token."""
    if has_env_host and host_options(plan.env).get("token") is not None:
        return
    text = "Swarm publishes its port on all addresses of the node, and it would ask for no token"
    loopback = 'put {"ip": "127.0.0.1"} into /etc/docker/daemon.json, and restart Docker'
    raise EngineRefused(text, f"launch with --token auto; or {loopback}")
