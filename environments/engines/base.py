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
    """Where an engine is, and what it needs.

    Attributes:
        location: `module:Class`, or what else makes it. Only its agent imports it.
        preparation: What its replicas run.
        extra: The extra of openenvd that installs its library; None: it needs none.
        address: Returns the variables that say which engine it is, all of them, from a process's
            own (`address_here`). Raises `EngineFailed` when these lead nowhere. By default there is
            one for all processes of this machine.
        check_options: Called with the engine's own options of a replica, and whether it is in a
            `sandbox`; raises `EngineRefused` for what it would refuse, so that a launch need not
            begin. None: that is seen when the replica is started.
        has_own_addresses: Whether its replicas are reached where their instances say, and at no
            port of this machine.
        moves: Whether a replica that is started again has another address: its environment has
            one at the gateway then, also with one replica.
    """

    location: str
    preparation: Preparation
    extra: str | None = None
    address: Callable[[Mapping[str, str]], dict[str, str]] = lambda _: {}
    check_options: Callable[..., object] | None = None
    has_own_addresses: bool = False
    moves: bool = False


class EngineError(Exception):
    """Base of what an engine raises; `hint` says what to do, if possible as a command."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class EngineGone(EngineError):
    """The engine does not answer: not running, being restarted, no permission. Tried again."""


class EngineRefused(EngineError):
    """The engine answers, and will not do it as asked: a missing image, an unknown option."""


class NameTaken(EngineRefused):
    """Something that is not ours has the name of an instance, which is gone, or never was."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Whose an instance is. Everything that is made on an engine carries them.

    Attributes:
        home: Names the daemon's home; no other machine or user has the same.
        environment: The environment's name.
        replica: The replica's id, which no other replica of any home has.
        generation: The id of the launch's request.
    """

    home: str
    environment: str
    replica: str
    generation: str

    def to_labels(self) -> dict[str, str]:
        """Return them as the engine is given them."""
        return {
            HOME_LABEL: self.home,
            ENVIRONMENT_LABEL: self.environment,
            REPLICA_LABEL: self.replica,
            GENERATION_LABEL: self.generation,
        }

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Labels | None:
        """Return what an engine's labels say; None when they are not ours."""
        names = (HOME_LABEL, ENVIRONMENT_LABEL, REPLICA_LABEL, GENERATION_LABEL)
        if not all(labels.get(name) for name in names):
            return None
        return cls(*(labels[name] for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One replica, as an engine is to start it. It stands in the replica's run file.

    Attributes:
        labels: Whose it is.
        image: What runs: an image's id or reference, or what else the engine calls so.
        image_name: The name that it had at the launch, for messages; None: `image` is one.
        command: What runs in it; empty: what the image says.
        env: Its variables, beside the image's own.
        host: The address of this machine that the port is published on.
        port: The port there. It is reserved for this replica.
        container_port: The port that the server listens on inside.
        memory_bytes: The memory limit, swap included; None: none.
        cpus: The CPU limit, in CPUs; None: none.
        gpus: How many GPUs it gets.
        ordinal: The number of this replica among its environment's: which GPUs it takes, say.
        sandbox: Whether to take from it what a server does not need: a read-only root, no
            capabilities, no new privileges.
        options: The engine's own options (`--engine-option NAME=VALUE`).
        folder: Where the command runs, on an engine that runs programs rather than images.
        links: Of such a program: import names, and the folders that they stand for.
        run_dir: The replica's folder, as the agent knows it.
    """

    labels: Labels
    image: str
    image_name: str | None = None
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    host: str
    port: int
    container_port: int = CONTAINER_PORT
    memory_bytes: int | None = None
    cpus: float | None = None
    gpus: int = 0
    ordinal: int = 0
    sandbox: bool = False
    options: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    links: dict[str, str] = field(default_factory=dict)
    run_dir: str = ""

    @property
    def name(self) -> str:
        """Return what the instance is called on the engine, where names are unique."""
        return f"openenvd-{self.labels.replica}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` can read."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaPlan:
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError: It is something else.
        """
        known = {"labels": Labels(**data["labels"]), "command": tuple(data["command"])}
        return cls(**{**data, **known})


class InstanceState(StrEnum):
    """The state of an instance. The agent asks whether its server answers."""

    STARTING = "starting"  # created, pulled, waiting for a place
    RUNNING = "running"
    EXITED = "exited"  # it is still there, with its exit and its log


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFacts:
    """What an engine knows of how an instance ended; an `ExitReason` is made of it.

    Attributes:
        exit_code: As the engine gives it: 128 + n for a signal. None: it never ran, or is unknown.
        is_oom: Whether the engine says that something in it was killed for using too much memory,
            since it began.
        oom_at: When that was the last time, in seconds since the epoch, where the engine says so.
        reason: How its server exited, as what started that in the instance has explained it.
        detector: Who says that it was, or killed it for that.
        error: Why it could not be started, in the engine's words; None if it could.
        seconds: How long it had run.
        peak_bytes: The most memory that it held, where the engine says so.
        evidence: One line for people: `container 3f2a91c0, OOMKilled`.
        ended_by: What ended it, where that was the engine's doing: `its node has failed`.
        is_time_over: Whether that was since it may not run any longer.
    """

    exit_code: int | None = None
    is_oom: bool = False
    oom_at: float | None = None
    reason: dict[str, Any] | None = None
    detector: Detector = Detector.ENGINE
    error: str | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    evidence: str | None = None
    ended_by: str | None = None
    is_time_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One thing that the engine has and that carries our labels.

    Attributes:
        id: What the engine calls it, permanently: no later instance has the same. It is made of
            letters, digits, and `_.:-/`.
        labels: Whose it is.
        state: How far it is.
        pid: Its first process, if that runs on this machine and is known; for people.
        address: `http://host:port`, where it may be reached beside its plan's port: the agent
            tries it first, and the gateway uses what has answered.
        waiting: Why it is still STARTING, or cannot go on, in a sentence, where the engine says
            so.
        is_on_its_way: Whether it is started as any is, and `waiting` only says how far it is:
            nothing keeps it from that.
        drains: Whether its server ends its sessions at SIGUSR1, which ends others at once.
        ends_at: When the engine ends it, whatever it does, as `boot_seconds` counts here; None:
            never, as far as is known.
        replace_at: When to ask for another one, so that its sessions can end before that.
        runs: How many times the engine itself has restarted it.
        why_anew: In a sentence, why the engine restarted it the last time.
        is_silent: Whether nothing has been heard of it for longer than it may say nothing. It has
            ended, as far as anybody here can tell, when its server does not answer either.
        exit: How it ended, once it is EXITED.
    """

    id: str
    labels: Labels
    state: InstanceState
    pid: int | None = None
    address: str | None = None
    waiting: str | None = None
    is_on_its_way: bool = False
    drains: bool = True
    ends_at: float | None = None
    replace_at: float | None = None
    runs: int = 0
    why_anew: str | None = None
    is_silent: bool = False
    exit: ExitFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """A piece of an instance's output, both streams together.

    Attributes:
        data: As it was printed.
        cursor: Where the next piece begins: the engine's own words, given back to `logs`.
    """

    data: bytes
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether an engine works here.

    Attributes:
        version: The engine's; None when it does not answer.
        problem: What is missing, in a sentence; None: it works.
        remedy: The command that fixes it.
        notes: What works less well than it could, a sentence each.
    """

    version: str | None = None
    problem: str | None = None
    remedy: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Return whether replicas can be started."""
        return self.problem is None


class Engine(Protocol):
    """One engine. Made by its class without arguments, in the agent, whose variables it reads.

    Making one neither connects nor fails.
    """

    @property
    def name(self) -> str:
        """Return what it is called in `--provider`: the name of its entry point."""

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
