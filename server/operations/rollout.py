# SPDX-License-Identifier: Apache-2.0
"""`rollout`: many episodes of a policy, into a folder.

    main thread: waits, is cancelled          thread "rollout": the event loop
    ───────────────────────────────           ────────────────────────────────
    run ──config─────────────────────────────▶ rollouts.run.roll_out
    TaskCancelled ──call_soon_threadsafe─────▶ task.cancel(): sessions closed, finished kept
    context.progress, the log ◀───report, each second

When it runs again, after a crash or by hand, it plays only the episodes that the folder lacks.
`rollouts` is imported only to run it, since the daemon reads nothing but the payload.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ...environments import run_files
from ...environments.access import find_replica
from ...environments.engines.started_replicas import is_ready
from ...environments.replica_state import more_memory_after
from ...environments.shim.client import ShimClient, ShimGone, read_status_file
from ...schema.errors import NotAnswering
from ...schema.layout import Layout
from ...schema.operation_options import RolloutOptions
from ...schema.protocol import ENVIRONMENT_HEADER, GENERATION_HEADER
from ...schema.states import ErrorKind
from ...system.net.access import with_token, without_token
from ...system.process.exit_reason import ExitReason
from ...system.text.units import MB, plural
from ..tracing import start, stop
from . import base

if TYPE_CHECKING:
    from ...rollouts.errors import AllFailed
    from ...rollouts.run import Report, RunConfig
    from ...rollouts.session.session import Server

LOG_SECONDS = 10.0  # between two log lines about progress
POLL_INTERVAL_SECONDS = 0.1  # between two reads of an environment's status
EXIT_SECONDS = 2.0  # from a session's last message until the status has the exit


class RolloutPayload(base.payload_of(RolloutOptions)):  # type: ignore[misc]  # a class made at run time
    """The environments of a rollout, and its options."""

    name: str = Field(
        min_length=1, max_length=base.MAX_TEXT, description="An environment's name, or a URL."
    )
    more_names: list[str] = Field(
        default_factory=list, description="Further environments, which take turns with it."
    )
    out: base.AbsolutePath = Field(min_length=1, description="The folder to write to; absolute.")
    cwd: base.AbsolutePath | None = Field(
        None, description="The folder that the policy's module is looked for in; an absolute path."
    )

    # Each validator uses fields that are declared, and so validated, before its own.

    @field_validator("tree")
    @classmethod
    def _is_tree(cls, value: str | None) -> str | None:
        if value is not None:
            from ...rollouts.trees import Tree

            Tree.parse(value)
        return value

    @field_validator("group", "advantages", "filters")
    @classmethod
    def _is_possible(cls, value: Any, info: ValidationInfo) -> Any:
        before = "episodes" if info.field_name == "group" else "group"
        if value and before in info.data:
            from ...rollouts.stages import named_parts

            check = getattr(named_parts, f"check_{info.field_name}")
            # A tree is a group by itself.
            check(value, info.data[before] or (1 if info.data.get("tree") else None))
        return value

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.names)) < len(self.names):
            raise ValueError("an environment is named twice")
        return self

    @property
    def names(self) -> list[str]:
        """The names of all environments."""
        return [self.name, *self.more_names]

    def run_config(
        self, addresses: Mapping[str, str], followed: Mapping[str, FollowedEnvironment]
    ) -> RunConfig:
        """Return the payload's run; `followed` are this daemon's environments, by address."""
        from ...rollouts.run import RunConfig
        from ...rollouts.stages.named_parts import Stages

        group = 1 if self.group is None and self.tree is not None else self.group
        named = {} if self.advantages is None else {"advantages": self.advantages}
        same = {item.name for item in fields(RunConfig)} & set(type(self).model_fields)
        return RunConfig(
            **{name: getattr(self, name) for name in same - {"seed"}},
            environments=addresses,
            followed=followed,
            folder=Path(self.out),
            # The episodes of a group begin alike only if they have seeds.
            seed=0 if group is not None and self.seed is None else self.seed,
            stages=Stages(group, filters=tuple(self.filters), **named),
            buffer_bytes=self.buffer_mb * MB,
        )


class Rollout(base.Operation):
    """Rolls out one policy. If it runs again, it plays the episodes that the folder lacks."""

    name = "rollout"
    summary = "Run many episodes of a policy, and write them to a folder."
    schedule = "LONG"
    max_attempts = 5
    expected_bytes = 100 * MB
    Payload = RolloutPayload

    @staticmethod
    def run(payload: RolloutPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"out", "episodes", "earlier", "steps", "mean_reward", "failures", "lag", …}`."""
        from ...rollouts.errors import AllFailed
        from ...rollouts.run import roll_out
        from ...rollouts.session.loop_thread import run_on_thread
        from ...rollouts.stages.named_parts import importable

        reporter = _ProgressReporter(context)
        runs = Layout(context.home).runs
        named = {n: FollowedEnvironment(runs, n) for n in payload.names if "://" not in n}
        for name, environment in named.items():
            if environment.is_starting():  # or restarting
                base.say(f"waiting for {name}, which is being started")
            while environment.is_starting():
                time.sleep(POLL_INTERVAL_SECONDS)
        urls = {without_token(n)[0]: named[n].base_url if n in named else n for n in payload.names}
        config = payload.run_config(urls, {each.base_url: each for each in named.values()})
        addresses = (without_token(url)[0] for url in config.environments.values())
        base.say(f"{plural(config.episodes, config.unit)} at {', '.join(addresses)}")
        folder = Path(payload.cwd) if payload.cwd else None
        with importable(folder), _variables(payload.env), _tracing() as tracer:
            try:
                result = run_on_thread(roll_out(config, reporter.report, base.say, tracer=tracer))
            except AllFailed as exc:
                for environment in named.values():
                    environment.explain(exc)
                raise
            # Before the remaining traces are sent.
            kept, ran = plural(result["there"], result["unit"]), plural(result["steps"], "step")
            are = "is" if result["there"] == 1 else "are"
            base.say(f"{kept} {are} in {result['out']}; {ran} in {result['seconds']:.1f} s")
        return result


class FollowedEnvironment:
    """An environment, as long as the launch that this object found still runs it.

    Attributes:
        name: The name of the environment.
        base_url: Its address, with its token.
        server: The name and the launch that its handshakes state.
    """

    def __init__(self, runs: Path, name: str) -> None:
        """Raises `NotAnswering`: none was started here, or it does not take sessions."""
        found = find_replica(runs, name, for_sessions=True)
        self._runs = runs
        self.name = name
        self._launch = found.request_id
        self.base_url = with_token(found.address, found.token)
        headers = run_files.server_options(found.data)["headers"]
        self.server: Server = headers[ENVIRONMENT_HEADER], headers[GENERATION_HEADER]

    def is_starting(self) -> bool:
        """Return whether it has replicas, but none that takes sessions. Reads files.

        Raises `NotAnswering`: it was updated, taken down, or given up.
        """
        found = run_files.of_environment(self._runs, self.name)
        own = [run_file for run_file in found if run_file.request_id == self._launch]
        if not own:
            how = "was updated" if found else "was taken down, or has failed for good,"
            raise NotAnswering(
                f"{self.name} {how} before this had ended",
                f"what has finished is kept; when {self.name} runs, run the same command again",
            )
        known = ((each, read_status_file(each.run_dir) or {}) for each in own)
        return not any(is_ready(f, s) and not s.get("is_draining") for f, s in known)

    def explain(self, error: AllFailed) -> None:
        """Give an error the kind and the hint of the kill for memory that it tells of, if any."""
        until = time.monotonic() + EXIT_SECONDS * (" for memory" in str(error))
        while error.kind != ErrorKind.OOM_KILLED and time.monotonic() < until:
            time.sleep(POLL_INTERVAL_SECONDS)
            for run_file in run_files.of_environment(self._runs, self.name):
                with suppress(ShimGone), ShimClient.connect(run_file.socket_path) as shim:
                    for one in shim.status.get("exits", ()):
                        if f"pid {one.get('pid')})" in str(error):
                            reason, own = ExitReason.from_json(one["reason"]), one["out_of_memory"]
                            error.kind = ErrorKind.OOM_KILLED
                            error.hint = more_memory_after(self._launch, reason, is_session=own)


class _ProgressReporter:
    """Reports progress to the daemon each time, and to the log now and then."""

    def __init__(self, context: base.OperationContext) -> None:
        self._context = context
        self._say_at = time.monotonic() + LOG_SECONDS

    def report(self, report: Report) -> None:
        """Report how far the rollout is; from any thread."""
        message = report.message()
        there = report.earlier + report.stats.trees
        left = report.wanted - report.earlier
        progress = {
            "phase": "rolling out",
            "message": message,
            "done": there,
            "total": report.wanted,
            "eta_seconds": base.eta_seconds(report.stats.trees, left, report.stats.seconds),
            "rollout": report.to_json(),
        }
        self._context.progress(progress)
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + LOG_SECONDS
            base.say(message)


@contextmanager
def _tracing() -> Iterator[Any]:
    """Provide an OpenTelemetry tracer, or None if its standard variables ask for none."""
    provider, note = start()
    try:
        if provider is None and note is not None:
            base.say(f"traces are {note}")
        yield None if provider is None else provider.get_tracer("openenvd")
    finally:
        if provider is not None:
            stop(provider)


@contextmanager
def _variables(env: Mapping[str, str]) -> Iterator[None]:
    """Set the variables meanwhile, and restore them afterwards."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        for name in env:
            os.environ.pop(name, None)
        os.environ.update((name, before[name]) for name in env.keys() & before)
