# SPDX-License-Identifier: Apache-2.0
"""The subject of a test, which is one replica, seen from clients and processes; and findings.

The played actions are given ones, the schema's examples, or random ones that the schema allows.
The frames are whole, whereas the sessions of `rollouts` and `client` turn them into results:

    {"type": "reset", "data": {…}}     {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": action}   the same
    {"type": "state"}                  {"type": "state", "data": {…}}
    any of them                        {"type": "error", "data": {message, code}}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

import psutil

from ....environments.access import ask
from ....environments.shim.client import ShimClient, ShimGone
from ....rollouts.policies.random_policy import sample
from ....rollouts.session import session as sessions
from ....rollouts.session.session import SessionEnd
from ....schema.errors import NotAnswering
from ....schema.operation_options import EnvironmentTestOptions
from ....schema.replica import StatusLine
from ....system.process.exit_reason import ExitReason
from ....system.text.json_lines import Json

Player = Callable[[], Json]  # draws one action after another

ASK_SECONDS = 30.0
SETTLE_SECONDS = 10.0  # until what has ended has released everything
POLL_INTERVAL_SECONDS = 0.05


CONNECT_SECONDS = 60.0  # enough for an environment that loads a model for its first session


class SessionFailed(Exception):
    """The session cannot be used: it was refused, silent or lost, or its answer is no frame."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Frame:
    """One answer, and how long it took."""

    kind: str
    data: Json
    seconds: float

    @property
    def error(self) -> str | None:
        """The message of an error frame; None for another frame."""
        if self.kind != "error":
            return None
        return f"{self.data.get('code')}: {sessions.error_text(self.data)}"


@dataclass(eq=False)
class TrialSession:
    """A session, open inside of `async with`."""

    base_url: str  # with the environment's token if it wants one
    answer_seconds: float  # until each answer must be there
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by message and frame
    _session: sessions.Session | None = None

    async def __aenter__(self) -> Self:
        try:
            self._session = await sessions.Session.open(
                self.base_url, connect_seconds=CONNECT_SECONDS, close_seconds=self.answer_seconds
            )
        except (sessions.SessionFailed, ValueError) as exc:
            raise SessionFailed(f"no session could be opened: {exc}") from exc
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def reset(self, **arguments: Any) -> Frame:
        """Begin an episode."""
        return await self.ask({"type": "reset", "data": arguments})

    async def step(self, action: Mapping[str, Any]) -> Frame:
        """Take a step."""
        return await self.ask({"type": "step", "data": action})

    async def state(self) -> Frame:
        """Ask for the state."""
        return await self.ask({"type": "state"})

    async def ask(self, message: Json | str) -> Frame:
        """Send a message, or a text that is not a valid message, and return the answer."""
        assert self._session is not None
        what = message["type"] if isinstance(message, dict) else "text"
        started = time.monotonic()
        data = message if isinstance(message, str) else json.dumps(message)
        try:
            text = await self._session.ask(data, self.answer_seconds, what)
        except sessions.SessionFailed as exc:
            if exc.reason is not SessionEnd.CONNECTION_LOST:
                raise SessionFailed(str(exc)) from exc
            why = "the connection was lost"
            if exc.close is not None:
                why = f"closed with {exc.close.code} {exc.close.reason}".rstrip()
            raise SessionFailed(f"a {what} ended the session: {why}") from exc
        seconds = time.monotonic() - started
        try:
            frame = json.loads(text)
            found = dict(frame.get("data") or {})
            if "odd_reward" in frame:  # by which our server names what JSON has as null
                found["reward"] = frame["odd_reward"]
            self.answers[what, frame["type"]] += 1
            return Frame(frame["type"], found, seconds)
        except (ValueError, KeyError, TypeError) as exc:
            raise SessionFailed(f"a {what} was answered by no frame: {text[:200]!r}") from exc

    async def end(self) -> bool:
        """Send the close message; return whether the server closes the connection in time."""
        assert self._session is not None
        return await self._session.end(self.answer_seconds)


@dataclass(frozen=True, slots=True)
class Holdings:
    """The resources of the server's processes at one moment; None: not reported."""

    memory_bytes: int
    descriptors: int
    threads: int
    processes: int  # including zombies
    tasks: int | None


@dataclass(frozen=True, slots=True)
class Actions:
    """The source of a test's actions."""

    schema: Json  # of an action, as `GET /schema` says it
    known: Sequence[Json]  # to choose from; empty: they are drawn from the schema
    origin: str  # the words for it in the report

    def player(self, seed: object) -> Player:
        """Return a function that draws actions, the same ones for the same seed."""
        rng = random.Random(str(seed))  # noqa: S311  # an action is no secret
        return lambda: rng.choice(self.known) if self.known else sample(self.schema, rng)


@dataclass(slots=True)
class Subject:
    """The environment under test."""

    name: str
    base_url: str
    socket_path: str  # of its shim
    schemas: Json  # of action, observation and state
    actions: Actions
    plan: EnvironmentTestOptions
    tell: Callable[[str, int, int], None]  # reports progress: a sentence, done, total
    max_sessions: int = 1
    shares_state: bool = False  # among all sessions
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # of all its sessions

    def session(self, address: str = "") -> TrialSession:
        """Return a session to enter; `address` is a branch's."""
        address = address or self.base_url
        return TrialSession(address, self.plan.step_timeout_seconds, self.answers)

    def status(self) -> StatusLine:
        """Return what the shim says of the server; nothing while it cannot be asked. Blocks."""
        try:
            with ShimClient.connect(self.socket_path) as link:
                return link.status
        except (ShimGone, TimeoutError):
            return {}

    def exits(self) -> tuple[int, int]:
        """Count the processes of the server that have exited: servers, and shards below them."""
        status = self.status()
        return status.get("restarts") or 0, status.get("shard_exits") or 0

    def last_exit(self, *, of_shard: bool) -> tuple[ExitReason | None, bool]:
        """How a server or shard last exited, if known; whether its limit is the replica's."""
        status = self.status()
        below = [one for one in status.get("exits") or () if not one.get("server")]
        shard: Json = max(below, key=lambda one: one.get("at") or 0.0, default={})
        last = shard.get("reason") if of_shard else status.get("last_exit")
        had_own_limit = of_shard and shard.get("out_of_memory")
        return ExitReason.from_json(last) if last else None, not had_own_limit

    def capacity(self) -> Json | None:
        """Ask the server for its sessions and tasks; None of a server that is not ours. Blocks."""
        try:
            answer: Json = ask(self.base_url, "/capacity", ASK_SECONDS)
        except NotAnswering:
            return None
        return answer if "shards" in answer else None

    def holdings(self) -> Holdings:
        """Return what the server's processes hold now. Blocks."""
        memory = descriptors = threads = 0
        found: list[psutil.Process] = []
        if pid := self.status().get("pid"):
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(pid)
                found = [root, *root.children(recursive=True)]
        for process in found:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_full_info().uss
                descriptors += process.num_fds()
                threads += process.num_threads()
        tasks = (self.capacity() or {}).get("loop_tasks")
        return Holdings(memory, descriptors, threads, len(found), tasks)

    async def settled(self) -> Holdings:
        """Return what is held once no session is left and nothing changes any more."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before: Sequence[Any] = ()
        while True:
            now = await asyncio.to_thread(self.holdings)
            capacity = await asyncio.to_thread(self.capacity)
            counts = (now.descriptors, now.threads, now.processes, now.tasks)
            is_empty = capacity is None or capacity["sessions"] == 0
            if (is_empty and counts == before) or time.monotonic() > deadline:
                return now
            before = counts
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def actions_of(schema: Json, given: Sequence[Json]) -> Actions:
    """Choose actions: the user's, or else the examples in the schema, or else random ones.

    An example is one of the model (`model_config = {"json_schema_extra": {"examples": [{…}]}}`).
    """
    if given:
        return Actions(schema, given, "the given actions")
    if examples := [each for each in schema.get("examples") or [] if isinstance(each, dict)]:
        return Actions(schema, examples, "the examples of the action's schema")
    return Actions(schema, (), "random actions by the action's schema")


class Outcome(StrEnum):
    """The outcome of a check, from best to worst."""

    PASSED = "passed"
    SKIPPED = "skipped"
    WARNED = "warned"  # worth a look, and no failure
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault."""

    found: str  # what was seen, with its figures
    means: str  # what follows from it for those who use the environment
    remedy: str
    is_failure: bool = True  # otherwise it is a warning


@dataclass(slots=True)
class CheckResult:
    """The outcome of one check."""

    check: str  # its name
    summary: str = ""  # one line: what was checked, and the result
    findings: list[Finding] = field(default_factory=list)
    figures: Json = field(default_factory=dict)  # what was measured, by name
    seconds: float = 0.0
    was_skipped: bool = False  # nothing was looked at, for the reason in `summary`

    @property
    def outcome(self) -> Outcome:
        """The outcome that follows from the findings."""
        if any(finding.is_failure for finding in self.findings):
            return Outcome.FAILED
        if self.findings:
            return Outcome.WARNED
        return Outcome.SKIPPED if self.was_skipped else Outcome.PASSED

    def to_json(self) -> Json:
        """The result as JSON values."""
        found = {**asdict(self), "outcome": self.outcome.value, "seconds": round(self.seconds, 3)}
        del found["was_skipped"]
        return found
