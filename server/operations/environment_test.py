# SPDX-License-Identifier: Apache-2.0
"""`test`: finds the faults of an environment that runs on this machine, by playing as its clients.

The checks and their verdicts are in `testing/`. The environment should have one shard and no other
clients: `openenv test` launches one for itself.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from ...environments import run_files
from ...environments.access import ask, base_url_by_name
from ...schema.errors import NotAnswering
from ...schema.layout import Layout
from ...schema.operation_options import CHECK_NAMES, EnvironmentTestOptions
from ...system.text.json_lines import Json
from ...system.text.units import MB
from . import base

if TYPE_CHECKING:
    from .testing.subject import CheckResult, Subject


SCHEMA_SECONDS = 30.0
TELL_SECONDS = 0.5  # between two reports of progress


class EnvironmentTestPayload(base.payload_of(EnvironmentTestOptions)):  # type: ignore[misc]  # made at run time
    """The environment to test, and the options of the test."""

    name: str = Field(min_length=1, description="The environment's name.")
    actions: list[Json] = Field(
        default_factory=list,
        max_length=base.MAX_ITEMS,
        description="Actions to play; by default the schema's examples, or random ones.",
    )

    @model_validator(mode="after")
    def _known_checks(self) -> Self:
        if unknown := sorted(set(self.skip) - set(CHECK_NAMES)):
            raise ValueError(f"skip: {', '.join(unknown)}: there are {', '.join(CHECK_NAMES)}")
        return self


class EnvironmentTest(base.Operation):
    """Tests one environment that runs."""

    name = "test"
    summary = "Find an environment's faults: protocol, leaks, blocking steps, determinism."
    schedule = "LONG"
    idempotent = False  # the command that launched its environment has ended with the daemon
    max_attempts = 1
    expected_bytes = 90 * MB
    Payload = EnvironmentTestPayload

    @staticmethod
    def run(payload: EnvironmentTestPayload, context: base.OperationContext) -> Json:
        """`{"name", "passed", "actions", "checks": [{"check", "outcome", "findings", …}]}`."""
        from ...rollouts.session.loop_thread import run_on_thread
        from .testing.run import run

        reporter = _Reporter(context)
        subject = _subject(payload, Layout(context.home), reporter)
        return run_on_thread(run(subject, payload.skip, reporter.ended))


def _subject(payload: EnvironmentTestPayload, layout: Layout, reporter: _Reporter) -> Subject:
    from .testing.subject import Subject, actions_of

    base_url = base_url_by_name(layout.runs, payload.name, for_sessions=True)
    replica = run_files.that_serves(layout.runs, payload.name)
    if replica is None or not replica.is_local:
        raise NotAnswering(f"{payload.name} does not run on this machine", "openenv test SOURCE")
    schemas = ask(base_url, "/schema", SCHEMA_SECONDS)
    subject = Subject(
        name=payload.name,
        base_url=base_url,
        socket_path=replica.socket_path,
        schemas=schemas,
        actions=actions_of(schemas.get("action") or {}, payload.actions),
        plan=EnvironmentTestOptions(**payload.model_dump(exclude={"name", "actions"})),
        tell=reporter.tell,
    )
    capacity = subject.capacity() or {}
    subject.max_sessions = capacity.get("max_sessions") or 1
    subject.shares_state = bool(capacity.get("shared_state"))
    return subject


class _Reporter:
    """Reports progress to the daemon, and each check's end to the log."""

    def __init__(self, context: base.OperationContext) -> None:
        self._context = context
        self._tell_at = 0.0
        self._begin(0)

    def tell(self, message: str, done: int, total: int) -> None:
        """Report how far a check is, now and then."""
        now = time.monotonic()
        if now < self._tell_at and done < total:
            return
        self._tell_at = now + TELL_SECONDS
        left = base.eta_seconds(done, total, now - self._since)
        progress = {"phase": self._check, "message": f"{self._check}: {message}"}
        self._context.progress({**progress, "done": done, "total": total, "eta_seconds": left})

    def ended(self, result: CheckResult) -> None:
        """Report the end of a check."""
        base.say(f"{result.check} {result.outcome.value}: {result.summary}")
        for finding in result.findings:
            base.say(f"  {finding.found}")
        following = CHECK_NAMES.index(result.check) + 1
        if following < len(CHECK_NAMES):
            self._begin(following)

    def _begin(self, number: int) -> None:
        self._check, self._since = CHECK_NAMES[number], time.monotonic()
        self._context.progress({"phase": self._check, "message": self._check})
