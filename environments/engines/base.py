# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine, by which an agent uses Docker, Swarm and all others.

An engine (to which the `EngineEntry` of an entry point leads, see `registry.py`) runs *instances*:
containers, services, jobs, pods. One instance serves one replica. The agent (`../agent/`) decides
what is done and when; an engine does it, and reports the instances that it has:

    start(plan) ──▶ Instance ──▶ is RUNNING ──▶ logs, signal ──▶ stop ──▶ is EXITED ──▶ remove
                                     └─ changes(): list them again (a hint, never the truth)

Rules for an engine

* Only the agent's process imports an engine's file, and with it the engine's library.
* Every method blocks, and is called from several threads at once. None retries: the agent does.
* An engine keeps nothing that matters in memory. The agent may be killed between any two lines; the
  next agent calls `list` and `find`, which find instances by their labels.
* An engine never restarts an instance: its restart policies are off. The daemon decides that.
* Every method raises `EngineGone` when the engine does not answer, and `EngineRefused` when it
  refuses. `stop`, `signal` and `remove` succeed if the instance is missing.

Failure cases, and how they are handled

    the agent is killed in `start`     the name is taken: `start` returns the instance that has it
    an instance is removed by hand     `find` returns None; the agent reports the replica as lost
    the engine is restarted            `changes` and `logs` raise `EngineGone`; the agent asks again
    events are missed                  the agent lists all instances when `changes` starts again
    the image is missing               `start` raises `EngineRefused` with the command that gets it
"""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from ...schema.errors import HintedError
from ...schema.replica import RunFileData
from ...system.process.exit_reason import Detector

T = TypeVar("T")

ENVIRONMENT_LABEL = "openenvd.environment"
REPLICA_LABEL = "openenvd.replica"
GENERATION_LABEL = "openenvd.generation"
HOME_LABEL = "openenvd.home"
LABELS = (HOME_LABEL, ENVIRONMENT_LABEL, REPLICA_LABEL, GENERATION_LABEL)  # fields of `Labels`
ENV_HOST_LABEL = "openenvd.env-host"  # the version of our env host in an image that has it
EXIT_KILLED, EXIT_TERMINATED = 128 + signals.SIGKILL, 128 + signals.SIGTERM
# Exit codes of an instance that ended well: if anything was killed for memory, it was a child.
FINE_EXITS = (0, EXIT_TERMINATED)
BUILT_LABEL = "openenvd.built"  # marks images that were built here, which `openenv prune` removes


class Preparation(StrEnum):
    """The preparation that replicas need before they are started (`preparation/prepare.py`)."""

    PROGRAM = "program"  # for a Python here; the engine's machines see the same folders
    IMAGE = "image"  # built or pulled by Docker here
    SHARED_IMAGE = "shared image"  # the same, under a name by which other machines can pull it
    PULLED_IMAGE = "pulled image"  # the engine's machines pull it


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """The code of an engine, and its requirements."""

    location: str  # `module:Class`, or another callable that makes it. Only its agent imports it.
    preparation: Preparation  # of what its replicas run
    extra: str | None = None  # the extra of openenvd that installs its library; None: it needs none
    # Returns all variables that identify the engine, from those of a process (`address_here`).
    # Raises `EngineFailed` when these lead nowhere. By default all processes use the same engine.
    address: Callable[[Mapping[str, str]], dict[str, str]] = lambda _: {}
    # Called with a replica's own options of the engine, and whether it is in a `sandbox`. Raises
    # `EngineRefused` for what the engine would refuse. None: the start of the replica is refused.
    check_options: Callable[..., object] | None = None
    # Whether replicas are reached at their instances' addresses alone, not at ports of this machine
    has_own_addresses: bool = False
    # Whether a replica has another address after each start: so it is always behind the gateway
    moves: bool = False


class EngineError(HintedError):
    """The base of an engine's errors; `hint` says what to do, if possible as a command."""


class EngineGone(EngineError):
    """The engine does not answer: it does not run, is restarted, or not permitted. Tried again."""


class EngineRefused(EngineError):
    """The engine refuses a request: the image is missing, or an option is unknown, say."""


class NameTaken(EngineRefused):
    """Something that is not ours has the name of an instance; so there is no such instance."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The owner of an instance. Everything that is made on an engine carries these labels."""

    home: str  # identifies the daemon's home; no other machine or user has the same
    environment: str  # the environment's name
    replica: str  # the replica's id, which no other replica of any home has
    generation: str  # the id of the launch's request

    def to_labels(self) -> dict[str, str]:
        """Return the labels under their names on an engine."""
        return dict(zip(LABELS, astuple(self), strict=True))

    @classmethod
    def of(cls, labels: Mapping[str, str] | None) -> Labels | None:
        """Return our labels among those of an instance; None if any is missing."""
        found = [(labels or {}).get(name) for name in LABELS]
        return cls(*filter(None, found)) if all(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """The plan by which an engine starts one replica, made of the replica's run file."""

    labels: Labels  # the owner
    image: str  # the id or reference of the image; empty: the engine runs a program
    # The image's name at the launch, for messages; None: `image` is a name
    image_name: str | None = None
    command: tuple[str, ...] = ()  # the command; empty: the image's own
    env: dict[str, str] = field(default_factory=dict)  # variables, beside the image's own
    host: str  # the address of this machine that the port is published on
    port: int  # the port there. It is reserved for this replica.
    memory_bytes: int | None = None  # the memory limit, swap included; None: none
    cpus: float | None = None  # the CPU limit, in CPUs; None: none
    gpus: int = 0  # how many GPUs it gets
    ordinal: int = 0  # the number of this replica in its environment, which decides on its GPUs
    # Whether it has no rights that a server does not need: its root is read-only, it has no
    # capabilities, and gets no new privileges
    sandbox: bool = False
    options: dict[str, str] = field(default_factory=dict)  # `--engine-option NAME=VALUE`
    folder: str = "/"  # the folder in which a program runs
    links: dict[str, str] = field(default_factory=dict)  # folders, by a program's import names
    run_dir: str = ""  # the replica's folder, as the agent knows it

    @property
    def name(self) -> str:
        """Return the instance's name on the engine, where names are unique."""
        return f"openenvd-{self.labels.replica}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, for the program that runs on a replica's node."""
        return asdict(self)

    @classmethod
    def of(cls, data: RunFileData) -> ReplicaPlan:
        """Return the plan in a run file; raises `KeyError` or `TypeError` for anything else."""
        written = dict(data["plan"])
        owner = (data["environment"], data["replica_id"], data["request_id"])
        return cls(
            labels=Labels(written.pop("home"), *owner),
            command=tuple(written.pop("command", ())),
            env=data["env"],
            host=data["host"],
            port=data["port"],
            ordinal=data["number"],
            run_dir=data["run_dir"],
            **written,
        )


class InstanceState(StrEnum):
    """The state of an instance. Whether its server answers is the agent's question."""

    STARTING = "starting"  # it is created, is pulled, or waits for a place
    RUNNING = "running"
    EXITED = "exited"  # it is still there, with its exit and its log


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFacts:
    """An engine's facts about the end of an instance, of which an `ExitReason` is made."""

    # As the engine reports it: 128 + n for a signal. None: it never ran, or the code is unknown.
    exit_code: int | None = None
    # Whether the engine reports that a process in it was ever killed for using too much memory
    is_oom: bool = False
    oom_at: float | None = None  # the last such kill, in seconds since the epoch, if it is known
    reason: dict[str, Any] | None = None  # the server's `ExitReason`, if its parent has made one
    detector: Detector = Detector.ENGINE  # what reports the kill for memory, or made it
    error: str | None = None  # why it could not be started, in the engine's words; None if it could
    seconds: float | None = None  # how long it had run
    peak_bytes: int | None = None  # the most memory that it held, if the engine reports it
    evidence: str | None = None  # one line for people: `container 3f2a91c0, OOMKilled`
    # Why the engine or others ended it, if it did not end by itself: `its node has failed`
    ended_by: str | None = None
    is_time_over: bool = False  # whether it was ended since its time limit was over


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One container, service, job or pod of the engine that carries our labels."""

    id: str  # the engine's, which no later instance has; of letters, digits, and `_.:-/`
    labels: Labels  # the owner
    state: InstanceState
    pid: int | None = None  # its first process, if that runs here and is known; for people
    # `http://host:port`, where it may be reached beside its plan's port: the agent tries it first,
    # and the gateway uses the address that has answered
    address: str | None = None
    # Why it is still STARTING, or cannot continue, in a sentence, if the engine says so
    waiting: str | None = None
    # Whether its start proceeds as usual: `waiting` describes the progress, and no obstacle
    is_on_its_way: bool = False
    # Whether its server drains at SIGUSR1; any other server would end at once
    drains: bool = True
    # When the engine ends it in any case, in `boot_seconds`; None: never, as far as is known
    ends_at: float | None = None
    # When to request its successor, so that its sessions can end before `ends_at`
    replace_at: float | None = None
    # Whether it has reported nothing for too long: it has ended if its server does not answer
    is_silent: bool = False
    exit: ExitFacts | None = None  # how it ended, once it is EXITED


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """A piece of an instance's output, both streams together."""

    data: bytes  # as it was printed
    cursor: str  # where the next piece begins, in the engine's own terms; an argument of `logs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The answer to whether an engine works here."""

    version: str | None = None  # of the engine; None when it does not answer
    problem: str | None = None  # what is missing, in a sentence; None: it works
    remedy: str | None = None  # the command that fixes the problem
    notes: tuple[str, ...] = ()  # what could work better, a sentence each


class Engine(Protocol):
    """One engine. Its constructor takes no arguments, and neither connects nor fails."""

    def check(self) -> Check:
        """Return the version and notes of an engine that works; raises why it does not."""

    def list(self) -> Iterable[Instance]:
        """Return all instances that carry our labels, of all homes, exited ones included.

        This is one request to the engine, however many there are: `exit`, `pid` and `address` may
        be left out. The agent compares states, and calls `find` for instances that have changed.
        """

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the instance of a replica as it is now, or None; raises `NameTaken`."""

    def start(self, plan: ReplicaPlan) -> Instance:
        """Create and start the instance of a replica, or return the one that has its name.

        An instance that was created but not started is started. An instance that has exited is
        returned as it is: the agent removes it first when it wants another. The method returns as
        soon as the engine has accepted the instance; on a refusal nothing is left behind.
        """

    def changes(self) -> Iterator[None]:
        """Yield whenever any instance of ours may have changed, until the engine is gone.

        The method blocks in between, in a thread of its own. It yields once as soon as it listens,
        so that no change between a list and the first event is missed. An engine without events
        sleeps and yields. At the end of the engine's stream it raises `EngineGone`.
        """

    def logs(self, instance: Instance, cursor: str | None) -> Iterator[LogChunk]:
        """Yield the output of an instance after `cursor` (None: from the start), as it comes.

        The agent calls this once the instance has begun to run. It ends when the instance has
        exited and all output has been delivered. A piece may be delivered twice, if cursors are as
        coarse as a clock, but none may be lost.
        """

    def signal(self, instance: Instance, number: int) -> None:
        """Send a signal to the first process of an instance.

        Raises `NotAnswering` if the signal is a request to the server, which does not answer now.
        """

    def stop(self, instance: Instance, grace_seconds: float) -> None:
        """Stop an instance: SIGTERM, and SIGKILL after the grace. Returns when it has exited.

        Its exit and its log stay until `remove`.
        """

    def remove(self, instance: Instance) -> None:
        """Remove an instance and all that was made for it; kill it if it still runs.

        Raises `EngineRefused` if the instance carries other labels, and so belongs to another.
        """


def require(found: T | None, plan: ReplicaPlan) -> T:
    """Return what was found of a plan that was just started; raises `EngineRefused` for None."""
    if found is None:
        raise EngineRefused(f"{plan.name} was removed while it was started")
    return found


def wait_until(is_over: Callable[[], bool], seconds: float, pause_seconds: float) -> bool:
    """Wait at most `seconds` until a condition holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not (has_ended := is_over()) and time.monotonic() < deadline:
        time.sleep(pause_seconds)
    return has_ended
