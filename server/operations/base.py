# SPDX-License-Identifier: Apache-2.0
"""The parts of an operation: a payload model, a schedule, an expected memory, and `run`.

The daemon's HTTP edge reads the class (payload, schedule, …); only a worker calls `run`, in its
own process, with the payload as JSON and an `OperationContext` as its only way out.
Anything `run` prints goes to the request's log.

A report of progress has the request's phase, and an estimate of the time that this still takes:

    {"phase", "message", "done"?, "total"?, "eta_seconds"?, "at_most_seconds"?}

`eta_seconds` is the rest of a count at the speed so far, `at_most_seconds` a limit.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from ...environments.engines.started_replicas import StartedReplica
from ...system.text.json_lines import Json
from ...system.text.options import Option, options_of
from ...system.text.units import MB, plural

MAX_SECONDS = 30 * 86_400.0  # of any time limit; much more does not fit the kernel's timers
MAX_MB = 2**30  # a petabyte: a larger number is a mistake
MAX_TEXT = 4096  # characters of a path or a name; a path of Linux has no more bytes
MAX_ITEMS = 64  # of a list


def _absolute(value: str) -> str:
    if not Path(value).is_absolute():
        raise ValueError(f"{value!r} is not an absolute path")
    return value


def _variables(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(f"{name!r} cannot be an environment variable")
    return value


AbsolutePath = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_absolute)]
Variables = Annotated[dict[str, str], AfterValidator(_variables)]


# Fields of payloads that 0.2.0 has queued, and that no payload has now.
_GONE = frozenset({"dockerfile", "keep_cached", "max_loop_lag_seconds", "session"})


class Payload(BaseModel):
    """Base of every operation's payload: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, data: Any) -> Any:
        """Refuse half of a surrogate pair, which JSON can spell, but which cannot be encoded."""
        try:
            json.dumps(data, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as exc:
            raise ValueError("it contains text that is not Unicode") from exc
        return data


def fields_of(*declarations: type, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return a model's field for each option that the declarations declare, or for `only` some."""
    items = (item for declaration in declarations for item in options_of(declaration))
    return {item.name: _field(item) for item in items if only is None or item.name in only}


def payload_of(*declarations: type) -> Any:
    """Make the base class of a payload, with the fields of these options."""
    name = f"{declarations[0].__name__}Payload"
    return create_model(name, __base__=Payload, **fields_of(*declarations))


def _field(item: Option) -> tuple[Any, Any]:
    by_unit = MAX_MB if item.name.endswith("_mb") else None
    most = item.most or (MAX_SECONDS if item.name.endswith("_seconds") else by_unit)
    bounds: dict[str, Any] = {"ge": item.least, "gt": item.above, "le": most}
    annotation = item.annotation
    if item.choices:
        bounds["pattern"] = f"^({'|'.join(item.choices)})$"
    elif item.kind is str:
        bounds = {"min_length": 1, "max_length": most or MAX_TEXT}
    elif item.kind is list:
        annotation = list[Annotated[str, Field(max_length=MAX_TEXT)]]
        bounds["max_length"] = MAX_ITEMS
    elif item.name == "env":
        annotation = Variables
    given = {name: value for name, value in bounds.items() if value is not None}
    return annotation, Field(item.default, description=item.help, **given)


def spell_number(value: Any) -> Any:
    """Convert a number of replicas to text, which a percentage is already."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def say(text: str) -> None:
    """Write a line for people into the request's log, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# uv reports the end of a phase; `_FOLLOWING` has the next one.
_UV = re.compile(r"\s*uv: (Resolved|Prepared) (\d+) packages?\b")
_FOLLOWING = {"Resolved": "downloading", "Prepared": "installing"}


@dataclass(frozen=True, slots=True)
class OperationContext:
    """The context of a running operation.

    `progress` reports a JSON object (a worker's pipe to the daemon; never blocks for long).
    Cancellation arrives as `executor.TaskCancelled` raised in the worker's main thread. If the
    daemon carries the operation out, its asyncio task is cancelled.
    """

    request_id: str
    home: Path  # OPENENV_HOME
    progress: Callable[[dict[str, Any]], None]
    say: Callable[[str], None] = say  # writes a line into the request's log

    def enter(self, phase: str, message: str) -> None:
        """Report that a phase begins, and with it the end of the one before."""
        self.progress({"phase": phase, "message": message})

    def enter_aloud(self, phase: str, message: str) -> None:
        """Report that a phase begins, also in the request's log."""
        self.say(message)
        self.enter(phase, message)

    def relay(self, line: str) -> None:
        """Write a line to the log; if uv wrote it, enter the phase that it announces."""
        self.say(line)
        if found := _UV.match(line):
            phase = _FOLLOWING[found[1]]
            self.enter(phase, f"{phase} {plural(int(found[2]), 'package')}")


class Operation:
    """One operation: these attributes and a static `run`. The defaults are a SHORT operation's.

    `server/reconcile/changes.py` carries out the operations that are `in_daemon`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one sentence for lists
    schedule: ClassVar[str] = "SHORT"  # or LONG: which workers may run it
    idempotent: ClassVar[bool] = True  # whether it may be run again after a lost daemon
    max_attempts: ClassVar[int] = 3
    expected_bytes: ClassVar[int] = 30 * MB  # of a worker, until that has been measured
    leaves_bytes: ClassVar[int] = 0  # what each replica that it starts needs beside the worker
    # Whether the daemon carries it out, with what its `run`, if it has one, has prepared.
    in_daemon: ClassVar[bool] = False
    Payload: ClassVar[type[Payload]] = Payload

    @classmethod
    def call(
        cls,
        payload: dict[str, Any],
        request_id: str,
        home: str,
        progress: Callable[[dict[str, Any]], None],
    ) -> Any:
        """Run the operation as the executor calls it, with its payload as JSON."""
        context = OperationContext(request_id, Path(home), progress)
        payload = {name: value for name, value in payload.items() if name not in _GONE}
        return cls.run(cls.Payload.model_validate(payload), context)

    @staticmethod
    def run(payload: Any, context: OperationContext) -> Any:
        """Do the work in a worker: return plain JSON, or raise an error of `schema.errors`."""
        raise NotImplementedError


MAX_LINE = 100  # characters of a replica's log in a message


def eta_seconds(done: float, total: float, seconds: float) -> float | None:
    """Estimate the remaining seconds from the speed so far; None before any progress."""
    return seconds / done * (total - done) if 0 < done <= total else None


class ReplicasAwaited:
    """Reports which replicas have become ready, and once each reason why others are not."""

    def __init__(self, context: OperationContext, total: int) -> None:
        self._context = context
        self._total = total
        self._started_at = time.monotonic()
        self._ready = 0
        self._reason = self._line = ""

    def on_ready(self, replica: StartedReplica) -> None:
        """Count a replica that is ready."""
        self._ready += 1
        seconds = time.monotonic() - self._started_at
        pid = replica.pid
        self._context.say(f"replica {replica.ordinal} (pid {pid}) is ready ({seconds:.1f} s)")
        self.report(f"{self._ready} of {plural(self._total, 'replica')} ready")

    def on_lasting(self, reason: str, seconds: float) -> None:
        """Report why the others are not ready after a while, and how long they still have."""
        if reason != self._reason:
            self._reason = reason
            left = f"{seconds // 60:.0f} min" if seconds >= 120 else f"{max(0.0, seconds):.0f} s"
            ends = f"openenv cancel {self._context.request_id[:8]} ends it"
            self._context.say(f"{reason}; gives up in {left}, {ends}")
        self.report(reason, at_most_seconds=round(seconds, 1))

    def on_line(self, line: str) -> None:
        """Report the last line of a replica's log while nothing else says why it is not ready."""
        if line not in ("", self._line):
            self._line = line
            ready = f"{self._ready} of {plural(self._total, 'replica')} ready"
            self.report(f"{ready}: {line[:MAX_LINE]}")

    def report(self, message: str, **more: float) -> None:
        """Report how many are ready."""
        counts = {"done": self._ready, "total": self._total}
        self._context.progress({"phase": "waiting", "message": message, **counts, **more})


class SessionsLeft:
    """Reports the number of sessions on replicas that must end within `seconds`."""

    def __init__(self, context: OperationContext, sessions: dict[str, int], seconds: float) -> None:
        self._context = context
        self._of_each = dict(sessions)
        self._left = self._total = sum(sessions.values())
        self._deadline = time.monotonic() + seconds
        self._report()

    def note(self, replica_id: str, sessions: int) -> None:
        """Take a replica's sessions as of now."""
        fewer = self._of_each.get(replica_id, 0) - sessions
        if fewer > 0:  # new sessions are not waited for
            self._of_each[replica_id] = sessions
            self._left -= fewer
            self._report()

    def _report(self) -> None:
        message = f"draining: {self._left} of {plural(self._total, 'session')} left"
        if not self._total:
            message = f"ending {plural(len(self._of_each), 'replica')}"
        at_most = round(max(0.0, self._deadline - time.monotonic()), 1)
        progress: Json = {"phase": "draining", "message": message, "at_most_seconds": at_most}
        if self._total:
            progress |= {"done": self._total - self._left, "total": self._total}
        self._context.progress(progress)
