# SPDX-License-Identifier: Apache-2.0
"""Docker: a container for each replica, through the `docker` library, in the agent's process.

    find, start, stop, …   requests to the engine's API, each answered in milliseconds
    changes                its stream of events about containers with our labels
    logs                   its stream of one container's output, with times; a cursor is the time
                           of the last piece, and how many pieces had that time

`options.py` finds the engine, by variables that the agent has.

An image keeps its own entry point, user and STOPSIGNAL. Its process runs below Docker's init:
upstream's images start their server from a shell, which as a first process would ignore SIGTERM.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import signal as signals
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import urllib3.exceptions
from docker.errors import APIError, DockerException

from ....schema.errors import InvalidSpec
from ....schema.protocol import CONTAINER_PORT
from ....system.process.proc import signal_name
from ....system.text.json_lines import Json
from .. import base, host_options
from ..instance_logs import pieces_after, since_of
from .options import INSTALL, USUAL_SOCKET, hint_on, host_config

if TYPE_CHECKING:
    from docker.types.daemon import CancellableStream


REQUEST_SECONDS = 60
CONNECTIONS = 256  # in the pool: a stream of logs for each replica, and some for requests
LOG_FILES, LOG_FILE_SIZE = "2", "16m"  # the engine's limits on a container's output
OOM_SCORE_ADJ = 300  # the same as for local replicas
LATE_SECONDS = 0.3  # after an exit, until Docker has reported the events that preceded it
_NEVER = "0001-01-01"  # Go's zero time
_DRAIN_SIGNALS = frozenset({signals.SIGUSR1, signals.SIGUSR2})  # our own, which end no server
_STATES = {
    "created": base.InstanceState.STARTING,
    "running": base.InstanceState.RUNNING,
    "restarting": base.InstanceState.RUNNING,
    "paused": base.InstanceState.RUNNING,
}  # all others are EXITED
_GPU_HINT = "install NVIDIA's container toolkit, and: sudo nvidia-ctk runtime configure"
_NO_LIVE_RESTORE = 'its restart ends replicas: {"live-restore": true} in /etc/docker/daemon.json'


class DockerEngine:
    """Runs replicas as containers."""

    _back_at = 0.0  # when Docker answered again after it had stopped; until then, inf

    def check(self) -> base.Check:
        with explained():
            info = self._api.info()
        return base.Check(version=info.get("ServerVersion"), notes=tuple(_notes(info)))

    def list(self) -> Iterable[base.Instance]:
        with explained():
            found = self._api.containers(all=True, filters={"label": base.HOME_LABEL})
        return [
            base.Instance(id=each["Id"], labels=whose, state=_state_of(each["State"]))
            for each in found
            if (whose := base.Labels.of(each["Labels"])) is not None
        ]

    def find(self, plan: base.ReplicaPlan) -> base.Instance | None:
        return self._instance(plan.name, plan.labels)

    def start(self, plan: base.ReplicaPlan) -> base.Instance:
        with explained():
            instance = self._find_or_create(plan)
            if instance.state is not base.InstanceState.STARTING:
                return instance
            try:
                self._api.start(instance.id)
            except APIError:
                self.remove(instance)
                raise
            return self._instance(instance.id) or instance

    def signal(self, instance: base.Instance, number: int) -> None:
        """Send a signal to the server, through Docker's init."""
        with explained(), gone_is_fine():
            self._api.kill(instance.id, signal=number)

    def stop(self, instance: base.Instance, grace_seconds: float) -> None:
        with explained(), gone_is_fine():
            self._api.stop(instance.id, timeout=math.ceil(grace_seconds))

    def remove(self, instance: base.Instance) -> None:
        """Remove a container, and the volumes that it alone has."""
        with explained(), gone_is_fine():
            if self._instance(instance.id, instance.labels) is not None:
                self._api.remove_container(instance.id, v=True, force=True)

    def changes(self) -> Iterator[None]:
        filters = {"type": "container", "label": base.HOME_LABEL}
        try:
            with explained(), _streamed(self._api.events(filters=filters)) as events:
                self._back_at = self._back_at and time.time()
                yield None
                for _ in events:
                    yield None
        finally:
            self._back_at = math.inf
        raise base.EngineGone("Docker has ended its stream of events")

    def logs(self, instance: base.Instance, cursor: str | None) -> Iterator[base.LogChunk]:
        return self.output(instance.id, cursor)

    def output(self, container: str, cursor: str | None) -> Iterator[base.LogChunk]:
        """Yield the output of any container, until it exits or the engine is gone."""
        options: Json = {"timestamps": True, "stream": True, "follow": True, **since(cursor)}
        with explained(), _streamed(self._api.logs(container, **options)) as stream:
            yield from pieces_after(stream, cursor)
        with explained(), contextlib.suppress(docker.errors.NotFound):
            if self._api.inspect_container(container)["State"]["Running"]:
                raise base.EngineGone("Docker has ended its stream of a container's output")

    @functools.cached_property
    def _api(self) -> docker.APIClient:
        """The connection, which is made by the first request that succeeds."""
        return docker.from_env(
            version="auto", timeout=REQUEST_SECONDS, max_pool_size=CONNECTIONS
        ).api

    @functools.cached_property
    def _has_bridges(self) -> bool:
        """Return whether this machine reaches its bridges, which a rootless engine hides."""
        security = self._api.info().get("SecurityOptions") or ()
        return not any("rootless" in each for each in security)

    def _instance(self, name: str, expected: base.Labels | None = None) -> base.Instance | None:
        with explained():
            try:
                found = self._api.inspect_container(name)
            except docker.errors.NotFound:
                return None
            state = _state_of(found["State"]["Status"])
            has_exited = state is base.InstanceState.EXITED
            events = events_of(self._api, found) if has_exited else ()
        labels = base.Labels.of(found["Config"].get("Labels"))
        if labels is None or expected not in (None, labels):
            problem = f"another container has the name {name}"
            raise base.NameTaken(problem, f"docker rm --force {name}")
        is_running = state is base.InstanceState.RUNNING
        return base.Instance(
            id=found["Id"],
            labels=labels,
            state=state,
            pid=found["State"].get("Pid") or None,
            address=own_address(found) if is_running and self._has_bridges else None,
            drains=has_env_host(found["Config"]),
            exit=exit_of(found, events, self._back_at) if has_exited else None,
        )

    def _find_or_create(self, plan: base.ReplicaPlan) -> base.Instance:
        if (found := self.find(plan)) is not None:
            return found
        try:
            self._create(plan)
        except APIError as exc:
            if exc.status_code != HTTPStatus.CONFLICT:
                raise  # CONFLICT: another thread or agent was faster
        return base.require(self.find(plan), plan)

    def _create(self, plan: base.ReplicaPlan) -> None:
        image = self._image_of(plan)
        has_token = host_options.host_options(plan.env).get("token") is not None
        if has_token and not has_env_host(image):
            text = f"the server in {plan.image} is its own, and would not ask for the token"
            hint = "leave out --token and --host; or make an image with ours: openenv image build"
            raise base.EngineRefused(text, hint)
        config = _configuration(plan, port_inside(image))
        self._api.create_container_from_config(config, plan.name)

    def _image_of(self, plan: base.ReplicaPlan) -> Json:
        """Return the configuration of a plan's image; raises `EngineRefused`: it is not here."""
        try:
            image = self._api.inspect_image(plan.image)
        except docker.errors.ImageNotFound as exc:
            named = plan.image_name or plan.image
            hint = f"docker pull {named}"
            if named != plan.image:  # the name may be another image's by now
                named, hint = f"{named} as it was launched ({plan.image})", "launch it again"
            raise base.EngineRefused(f"Docker has no image {named}", hint) from exc
        return dict(image["Config"])


@contextlib.contextmanager
def _streamed(stream: CancellableStream[Any]) -> Iterator[Iterable[Any]]:
    try:
        yield stream
    finally:
        vars(stream)["_response"].close()  # its connection, which the library's own `close` keeps


def _state_of(status: str) -> base.InstanceState:
    return _STATES.get(status, base.InstanceState.EXITED)


def has_env_host(image: Json) -> bool:
    """Return whether an image has our env host, by the configuration of it or of its container."""
    return base.ENV_HOST_LABEL in (image.get("Labels") or {})


def _configuration(plan: base.ReplicaPlan, inside: int) -> Json:
    host, own = host_config(plan.options, sandbox=plan.sandbox)
    port = f"{inside}/tcp"
    return {
        "Image": plan.image,
        "Cmd": list(plan.command) or None,
        "Env": [f"{name}={value}" for name, value in plan.env.items()],
        "Labels": plan.labels.to_labels(),
        "ExposedPorts": {port: {}},
        "HostConfig": {
            "PortBindings": {port: [{"HostIp": plan.host, "HostPort": str(plan.port)}]},
            "RestartPolicy": {"Name": "no"},
            "Init": True,
            "LogConfig": {
                "Type": "json-file",
                "Config": {"max-size": LOG_FILE_SIZE, "max-file": LOG_FILES},
            },
            "Memory": plan.memory_bytes or 0,
            "MemorySwap": plan.memory_bytes or 0,  # the sum of memory and swap: so no swap
            "NanoCpus": int((plan.cpus or 0) * 10**9),
            "DeviceRequests": _device_requests(plan),
            "OomScoreAdj": OOM_SCORE_ADJ,
            **host,
        },
        **own,
    }


def _device_requests(plan: base.ReplicaPlan) -> list[Json]:
    if not plan.gpus:
        return []
    request: Json = {"Driver": "", "Capabilities": [["gpu"]], "Count": plan.gpus}
    if found := host_options.find_gpus(os.environ):  # the engine would always choose the first
        try:
            devices = host_options.share(found, plan.gpus, plan.ordinal)
        except InvalidSpec as exc:
            raise base.EngineRefused(exc.message, exc.hint) from exc
        request |= {"Count": 0, "DeviceIDs": list(devices)}
    return [request]


def port_inside(config: Json) -> int:
    """Return the port that the server listens on: the only one that its image exposes, if any."""
    exposed = [name.partition("/") for name in config.get("ExposedPorts") or {}]
    ports = [int(port) for port, _, protocol in exposed if protocol in ("tcp", "")]
    return ports[0] if len(ports) == 1 else CONTAINER_PORT


def since(cursor: str | None) -> Json:
    """Return the option of a request for output that skips most of the pieces before a cursor."""
    found = since_of(cursor)
    return {} if found is None else {"since": max(1, int(found.timestamp()))}


def _notes(info: Json) -> Iterator[str]:
    if not info.get("MemoryLimit", True):
        yield "its kernel cannot limit memory: --memory is ignored"
    if not info.get("CpuCfsQuota", True):
        yield "its kernel cannot limit CPUs: --cpus is ignored"
    if not info.get("LiveRestoreEnabled", False):
        yield _NO_LIVE_RESTORE


@contextlib.contextmanager
def gone_is_fine() -> Iterator[None]:
    """Suppress the error that a container is missing, does not run, or is being removed."""
    try:
        yield
    except APIError as exc:
        if exc.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
            raise


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise the library's errors as `EngineGone` or `EngineRefused`, with a remedy."""
    try:
        yield
    except APIError as exc:
        text = str(exc.explanation or exc)
        if exc.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise base.EngineGone(text) from exc
        hint = _GPU_HINT if "device driver" in text else hint_on(text)
        raise base.EngineRefused(f"Docker refuses: {text}", hint) from exc
    except (DockerException, urllib3.exceptions.HTTPError, OSError) as exc:  # and of `requests`
        raise _gone(exc) from exc


def _gone(exc: BaseException) -> base.EngineGone:
    where = os.environ.get("DOCKER_HOST", USUAL_SOCKET)
    text = str(exc)
    if "PermissionError" in text or "Permission denied" in text:
        text = f"this user may not use Docker at {where}"
        return base.EngineGone(text, hint_on("permission denied"))
    if "FileNotFoundError" in text or "ConnectionRefused" in text or "No such file" in text:
        is_installed = shutil.which("docker") or shutil.which("dockerd")
        hint = hint_on("cannot connect") if is_installed else INSTALL
        return base.EngineGone(f"Docker is not running: nothing answers at {where}", hint)
    return base.EngineGone(f"Docker does not answer at {where}: {text}", hint_on("cannot connect"))


def own_address(container: Json) -> str | None:
    """Return a running container's `http://host:port` on a bridge; None: that is not in reach."""
    settings = container["NetworkSettings"]
    published = [name for name, at in (settings.get("Ports") or {}).items() if at]
    if len(published) != 1:
        return None
    try:
        of_process = Path("/proc", str(container["State"]["Pid"]), "cgroup").read_text()
    except OSError:
        return None
    if container["Id"] not in of_process:  # it runs on another machine
        return None
    port = published[0].partition("/")[0]
    for network in (settings.get("Networks") or {}).values():
        if network.get("IPAddress") and _is_of_this_machine(network.get("Gateway")):
            return f"http://{network['IPAddress']}:{port}"
    return None


def _is_of_this_machine(address: str | None) -> bool:
    """Return whether an address can be bound, which takes no privilege, and is this machine's."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind((address or "", 0))
        return bool(address)
    return False


def events_of(api: Any, found: Json) -> list[Json]:
    """Return Docker's events about an inspected container that has ended, oldest first."""
    state = found["State"]
    if state["StartedAt"].startswith(_NEVER) or state["FinishedAt"].startswith(_NEVER):
        return []
    began, ended = _seconds(state["StartedAt"]), _seconds(state["FinishedAt"]) + LATE_SECONDS
    period = {"since": f"{began:.9f}", "until": f"{ended:.9f}"}
    filters = {"container": found["Id"], "event": ["kill", "oom"]}
    return list(api.events(**period, filters=filters, decode=True))


def exit_of(found: Json, events: Iterable[Json] = (), back_at: float = 0.0) -> base.ExitFacts:
    """Return how an inspected container ended; Docker has no events from before `back_at`."""
    state = found["State"]
    if state["StartedAt"].startswith(_NEVER):
        return base.ExitFacts(error=state.get("Error") or "it never ran")
    code, oom_at, sent, seconds = state["ExitCode"], None, None, None
    if not state["FinishedAt"].startswith(_NEVER):
        seconds = max(0.0, _seconds(state["FinishedAt"]) - _seconds(state["StartedAt"]))
    for event in events:
        if event["Action"] == "oom":
            oom_at = event["timeNano"] / 1e9
        elif (number := int(event["Actor"]["Attributes"].get("signal", 0))) not in _DRAIN_SIGNALS:
            sent = number
    if sent == signals.SIGKILL and code == base.EXIT_KILLED:
        text = "sent through Docker: docker kill, or docker stop after its time-out"
        return base.ExitFacts(exit_code=code, seconds=seconds, evidence=text)
    if sent and code in (0, 128 + sent):
        text = f"{signal_name(sent)} was sent through Docker (docker kill, docker stop)"
        return base.ExitFacts(ended_by=text, seconds=seconds)
    if code in base.FINE_EXITS and seconds is not None and _seconds(state["FinishedAt"]) < back_at:
        return base.ExitFacts(ended_by=f"Docker was stopped ({_NO_LIVE_RESTORE})", seconds=seconds)
    is_oom = state["OOMKilled"] and code not in base.FINE_EXITS
    return base.ExitFacts(
        exit_code=code,
        is_oom=is_oom,
        oom_at=oom_at,
        seconds=seconds,
        evidence=f"container {found['Id'][:12]}, OOMKilled" if is_oom else None,
    )


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
