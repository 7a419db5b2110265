# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine: what an agent asks of Docker, Swarm and whatever is added to them.

An engine (which the `EngineEntry` of an entry point leads to, see `registry.py`) runs *instances*:
containers, services, jobs, pods. One instance serves one replica. The agent (`../agent/`) decides
what to do and when; an engine only does it, and reports what there is:

    start(plan) ──▶ Instance ──▶ is RUNNING ──▶ logs, signal ──▶ stop ──▶ is EXITED ──▶ remove
                                     └─ changes(): look at it again (a hint, never the truth)

Rules for an engine

* Only the agent's process imports an engine's file, and with it the engine's library.
* Every method blocks, and is called from threads, several at once. None retries: the agent does.
* It keeps nothing that matters in memory. The agent may be killed between any two lines; the next
  one has `list` and `find`, which ask the engine itself, by labels.
* It never restarts an instance: its own restart policies are off. The daemon decides that.
* Every method raises `EngineGone` when the engine does not answer, and `EngineRefused` when it
  answers no. What is not there (any more) is no error to `stop`, `signal` and `remove`.

Failure cases, and who handles them

    the agent is killed in `start`     the name is taken: `start` returns the instance that has it
    an instance is removed by hand     `find` returns None; the agent reports it as lost
    the engine is restarted            `changes` and `logs` raise `EngineGone`; the agent asks again
    events are missed                  the agent looks at every instance when `changes` starts again
    the image is missing               `start` raises `EngineRefused`, with the command that gets it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from ...schema.errors import HintedError
from ...schema.protocol import CONTAINER_PORT
from ...system.process.exit_reason import Detector

ENVIRONMENT_LABEL = "openenvd.environment"
REPLICA_LABEL = "openenvd.replica"
GENERATION_LABEL = "openenvd.generation"
HOME_LABEL = "openenvd.home"
ENV_HOST_LABEL = "openenvd.env-host"  # of images that have our env host: its version
BUILT_LABEL = "openenvd.built"  # of images that were built here, by `openenv prune` to be removed


class Preparation(StrEnum):
    """The preparation that replicas need before they are started (`preparation/prepare.py`)."""

    PROGRAM = "program"  # of a Python here; the engine's machines see the same folders
    IMAGE = "image"  # built or pulled by Docker here
    SHARED_IMAGE = "shared image"  # the same, named so that other machines can pull it
    PULLED_IMAGE = "pulled image"  # the engine's machines pull it


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Where an engine is, and what it needs."""

    location: str  # `module:Class`, or what else makes it. Only its agent imports it.
    preparation: Preparation  # what its replicas run
    extra: str | None = None  # the extra of openenvd that installs its library; None: it needs none
    # Returns the variables that say which engine it is, all of them, from a process's own
    # (`address_here`). Raises `EngineFailed` when these lead nowhere. By default there is one for
    # all processes of this machine.
    address: Callable[[Mapping[str, str]], dict[str, str]] = lambda _: {}
    # Called with the engine's own options of a replica, and whether it is in a `sandbox`; raises
    # `EngineRefused` for what it would refuse, so that a launch need not begin. None: that is seen
    # when the replica is started.
    check_options: Callable[..., object] | None = None
    # Whether its replicas are reached where their instances say, and at no port of this machine
    has_own_addresses: bool = False
    # Whether a replica that is started again has another address: its environment has one at the
    # gateway then, also with one replica
    moves: bool = False


class EngineError(HintedError):
    """Base of what an engine raises; `hint` says what to do, if possible as a command."""


class EngineGone(EngineError):
    """The engine does not answer: not running, being restarted, no permission. Tried again."""


class EngineRefused(EngineError):
    """The engine answers, and will not do it as asked: a missing image, an unknown option."""


class NameTaken(EngineRefused):
    """Something that is not ours has the name of an instance, which is gone, or never was."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Whose an instance is. Everything that is made on an engine carries them."""

    home: str  # names the daemon's home; no other machine or user has the same
    environment: str  # the environment's name
    replica: str  # the replica's id, which no other replica of any home has
    generation: str  # the id of the launch's request

    def to_labels(self) -> dict[str, str]:
        """Return them as the engine is given them."""
        return {
            HOME_LABEL: self.home,
            ENVIRONMENT_LABEL: self.environment,
            REPLICA_LABEL: self.replica,
            GENERATION_LABEL: self.generation,
        }

    @classmethod
    def of(cls, labels: Mapping[str, str] | None) -> Labels | None:
        """Return what an engine's labels say; None when they are not ours, or there are none."""
        names = (HOME_LABEL, ENVIRONMENT_LABEL, REPLICA_LABEL, GENERATION_LABEL)
        found = [(labels or {}).get(name) for name in names]
        return cls(*filter(None, found)) if all(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One replica, as an engine is to start it. It stands in the replica's run file."""

    labels: Labels  # whose it is
    image: str  # what runs: an image's id or reference, or what else the engine calls so
    # The name that it had at the launch, for messages; None: `image` is one
    image_name: str | None = None
    command: tuple[str, ...] = ()  # what runs in it; empty: what the image says
    env: dict[str, str] = field(default_factory=dict)  # its variables, beside the image's own
    host: str  # the address of this machine that the port is published on
    port: int  # the port there. It is reserved for this replica.
    container_port: int = CONTAINER_PORT  # the port that the server listens on inside
    memory_bytes: int | None = None  # the memory limit, swap included; None: none
    cpus: float | None = None  # the CPU limit, in CPUs; None: none
    gpus: int = 0  # how many GPUs it gets
    ordinal: int = 0  # the number of this replica among its environment's: which GPUs it takes, say
    # Whether to take from it what a server does not need: a read-only root, no capabilities, no new
    # privileges
    sandbox: bool = False
    # The engine's own options (`--engine-option NAME=VALUE`)
    options: dict[str, str] = field(default_factory=dict)
    folder: str = "/"  # where the command runs, on an engine that runs programs rather than images
    # Of such a program: import names, and the folders that they stand for
    links: dict[str, str] = field(default_factory=dict)
    run_dir: str = ""  # the replica's folder, as the agent knows it

    @property
    def name(self) -> str:
        """Return what the instance is called on the engine, where names are unique."""
        return f"openenvd-{self.labels.replica}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` can read."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaPlan:
        """Read what `to_json` wrote; raises `KeyError`, `TypeError`: it is something else."""
        known = {"labels": Labels(**data["labels"]), "command": tuple(data["command"])}
        return cls(**{**data, **known})


class InstanceState(StrEnum):
    """The state of an instance. The agent asks whether its server answers."""

    STARTING = "starting"  # created, pulled, waiting for a place
    RUNNING = "running"
    EXITED = "exited"  # it is still there, with its exit and its log


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFacts:
    """What an engine knows of how an instance ended; an `ExitReason` is made of it."""

    # As the engine gives it: 128 + n for a signal. None: it never ran, or is unknown.
    exit_code: int | None = None
    # Whether the engine says that something in it was killed for using too much memory, since it
    # began
    is_oom: bool = False
    # When that was the last time, in seconds since the epoch, where the engine says so
    oom_at: float | None = None
    # How its server exited, as what started that in the instance has explained it
    reason: dict[str, Any] | None = None
    detector: Detector = Detector.ENGINE  # who says that it was, or killed it for that
    error: str | None = None  # why it could not be started, in the engine's words; None if it could
    seconds: float | None = None  # how long it had run
    peak_bytes: int | None = None  # the most memory that it held, where the engine says so
    evidence: str | None = None  # one line for people: `container 3f2a91c0, OOMKilled`
    # What ended it, where that was the engine's doing: `its node has failed`
    ended_by: str | None = None
    is_time_over: bool = False  # whether that was since it may not run any longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One thing that the engine has and that carries our labels."""

    # What the engine calls it, permanently: no later instance has the same. It is made of letters,
    # digits, and `_.:-/`.
    id: str
    labels: Labels  # whose it is
    state: InstanceState  # how far it is
    # Its first process, if that runs on this machine and is known; for people
    pid: int | None = None
    # `http://host:port`, where it may be reached beside its plan's port: the agent tries it first,
    # and the gateway uses what has answered
    address: str | None = None
    # Why it is still STARTING, or cannot go on, in a sentence, where the engine says so
    waiting: str | None = None
    # Whether it is started as any is, and `waiting` only says how far it is: nothing keeps it from
    # that
    is_on_its_way: bool = False
    # Whether its server ends its sessions at SIGUSR1, which ends others at once
    drains: bool = True
    # When the engine ends it, whatever it does, as `boot_seconds` counts here; None: never, as far
    # as is known
    ends_at: float | None = None
    # When to ask for another one, so that its sessions can end before that
    replace_at: float | None = None
    runs: int = 0  # how many times the engine itself has restarted it
    why_anew: str | None = None  # in a sentence, why the engine restarted it the last time
    # Whether nothing has been heard of it for longer than it may say nothing. It has ended, as far
    # as anybody here can tell, when its server does not answer either.
    is_silent: bool = False
    exit: ExitFacts | None = None  # how it ended, once it is EXITED


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """A piece of an instance's output, both streams together."""

    data: bytes  # as it was printed
    cursor: str  # where the next piece begins: the engine's own words, given back to `logs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether an engine works here."""

    version: str | None = None  # the engine's; None when it does not answer
    problem: str | None = None  # what is missing, in a sentence; None: it works
    remedy: str | None = None  # the command that fixes it
    notes: tuple[str, ...] = ()  # what works less well than it could, a sentence each


class Engine(Protocol):
    """One engine. Made by its class without arguments, in the agent, whose variables it reads.

    Making one neither connects nor fails.
    """

    def check(self) -> Check:
        """Return what is known of an engine that works; raise why it does not."""

    def list(self) -> Iterable[Instance]:
        """Return everything that carries our labels, of all homes, what has exited included.

        One question to the engine, whatever their number: `exit`, `pid` and `address` may be left
        out. The agent compares states, and asks `find` about those that have changed.
        """

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the instance of a replica as it is now; None when there is none.

        Raises:
            NameTaken
        """

    def start(self, plan: ReplicaPlan) -> Instance:
        """Create and start the instance of a replica; return the one that has its name, if any.

        An instance that was created but not started is started. One that has exited is returned
        as it is: the agent removes it first when it wants another. It returns as soon as the
        engine has accepted it; on a refusal nothing is left behind.
        """

    def changes(self) -> Iterator[None]:
        """Yield whenever any instance of ours may have changed, until the engine is gone.

        It blocks in between, in a thread of its own. It yields once as soon as it listens, so that
        nothing between a look and the first event is missed. An engine without events sleeps and
        yields. The end of the engine's stream is `EngineGone`.
        """

    def logs(self, instance: Instance, cursor: str | None) -> Iterator[LogChunk]:
        """Yield what an instance has printed after `cursor` (None: from the start), and prints.

        It is called for one that has begun to run, and ends when that has exited and all of its
        output has been delivered. A piece may be delivered again, after a cursor of a clock's
        precision, but none may be lost.
        """

    def signal(self, instance: Instance, number: int) -> None:
        """Send a signal to the first process of an instance.

        Raises:
            NotAnswering: The server has to be asked instead, and does not answer at the moment.
        """

    def stop(self, instance: Instance, grace_seconds: float) -> None:
        """Stop an instance: SIGTERM, and SIGKILL after the grace. Returns when it has exited.

        Its exit and its log stay until `remove`.
        """

    def remove(self, instance: Instance) -> None:
        """Remove an instance and all that was made for it, killing what is left of it.

        What has its id and carries other labels belongs to another: `EngineRefused`.
        """
