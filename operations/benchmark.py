# SPDX-License-Identifier: Apache-2.0
"""`benchmark`: how many sessions an environment holds at once, and how long they take.

    find address and processes ─▶ see that it can wait ─▶ sweep the grid ─▶ files, figures, table

The load comes from generators, processes of their own (`bench/`); this one waits for them, and ends
them when it is cancelled. What it prints, batch by batch, is the request's log.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from ..bench.errors import InvalidPlan
from ..bench.plan import DEFAULT_TIMEOUT_SECONDS, MODES, Plan
from ..environments import run_files
from ..environments.http_get import ask, base_url_by_name
from ..environments.layout import Layout, make_private
from ..shim.client import ShimClient, ShimGone
from ..system.access_tokens import without_token
from ..system.extras import install_command
from ..system.units import MB
from . import base
from .progress import eta_seconds

if TYPE_CHECKING:
    from ..bench.results import Summary
    from ..bench.target import Target

Json = dict[str, Any]

SCHEMA_SECONDS = 30.0


class BenchmarkPayload(base.Payload):
    """What is to be measured, and how."""

    name: str = Field(min_length=1, description="The environment's name.")
    requests_grid: list[int] = Field(
        [32, 128, 512], description="Sessions at once, batch by batch."
    )
    wait_grid: list[float] = Field([1.0], description="Seconds that a step waits.")
    repetitions: int = Field(3, description="How often each batch is measured.")
    modes: list[str] = Field(["ws"], description=f"Over what: {', '.join(MODES)}.")
    action: Json | None = Field(
        None, description="Action of each step; by default {'wait_seconds': …}."
    )
    session_timeout_seconds: float = Field(
        DEFAULT_TIMEOUT_SECONDS,
        gt=0,
        le=base.MAX_SECONDS,
        description="Time limit of a session, beyond its wait.",
    )
    generators: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Number of load-generator processes; by default from the number of cores.",
    )
    window: int | None = Field(
        None,
        ge=1,
        description="Handshakes under way at once; by default all of a batch.",
    )
    output_dir: base.AbsolutePath | None = Field(
        None,
        description="Folder for results, an absolute path; by default below the daemon's home.",
    )

    @model_validator(mode="after")
    def _measurable(self) -> Self:
        try:
            self.plan()
        except InvalidPlan as exc:
            raise ValueError(exc.message) from exc
        return self

    def plan(self) -> Plan:
        """The grid.

        Raises:
            InvalidPlan
        """
        return Plan(
            requests_grid=tuple(self.requests_grid),
            wait_grid=tuple(self.wait_grid),
            repetitions=self.repetitions,
            modes=tuple(self.modes),
            action=self.action,
            timeout_seconds=self.session_timeout_seconds,
            generators=self.generators,
            window=self.window or 0,
        )


class Benchmark(base.Operation):
    """Measures one environment that runs."""

    name = "benchmark"
    summary = "Measure how many sessions an environment holds at once."
    schedule = "LONG"
    idempotent = False  # half an hour of load is not repeated by itself
    max_attempts = 1
    expected_bytes = 160 * MB  # generators, results and matplotlib
    Payload = BenchmarkPayload

    @staticmethod
    def run(payload: BenchmarkPayload, context: base.OperationContext) -> Json:
        """`{"name", "address", "folder", "files", "figures", "max_batch", "table"}`.

        Raises:
            NotAnswering, BenchError
        """
        return _Measuring(payload, context).run()


class _Measuring:
    """One running measurement."""

    def __init__(self, payload: BenchmarkPayload, context: base.OperationContext) -> None:
        self._payload = payload
        self._context = context
        self._layout = Layout(context.home)
        self._plan = payload.plan()
        self._folder = _folder_of(payload, context)
        self._started_at = time.monotonic()

    def run(self) -> Json:
        from ..bench import figures, table  # in the worker that measures, not in every worker
        from ..bench.sweep import Sweep

        base_url = base_url_by_name(self._layout.runs, self._payload.name)
        self._check_action(base_url)
        target = self._target(base_url)
        address = target.url
        base.say(f"{self._payload.name} is measured at {address}; results go to {self._folder}")
        sweep = Sweep(
            self._plan,
            [target],
            self._folder,
            on_progress=self._on_progress,
            on_summary=_tell,
        )
        files = sweep.run()
        drawn = figures.draw_all(sweep.report, self._folder)
        lines = table.lines_of(sweep.report)
        keys = sorted({(s.mode, s.wait_seconds, s.server) for s in sweep.report.summaries})
        if not figures.can_draw():
            lines.append(f"no figures: matplotlib is not installed ({install_command('bench')})")
        for line in lines:
            base.say(line)
        return {
            "name": self._payload.name,
            "address": address,
            "folder": str(self._folder),
            "files": [str(path) for path in files],
            "figures": [str(path) for path in drawn],
            # By mode and wait, the largest batch of which 95 % succeeded.
            "max_batch": {
                f"{mode}, wait {wait:g} s": table.max_batch(
                    sweep.report.summaries, server, wait, mode
                )
                for mode, wait, server in keys
            },
            "table": lines,
        }

    def _check_action(self, base_url: str) -> None:
        """Check that the environment can wait, or that an action was given.

        Raises:
            NotAnswering
            InvalidPlan: its actions know no `wait_seconds`, and none was given.
        """
        schema = ask(base_url, "/schema", SCHEMA_SECONDS).get("action") or {}
        known = schema.get("properties") or {}
        if self._payload.action is None and "wait_seconds" not in known:
            fields = ", ".join(name for name in known if name != "metadata") or "none"
            raise InvalidPlan(
                f"{self._payload.name} cannot wait: its actions have no wait_seconds ({fields})",
                "say what a step does with --action '{…}', or measure the bundled one: "
                "openenv launch benchmark",
            )

    def _target(self, base_url: str) -> Target:
        from ..bench.target import Target

        replicas = run_files.of_environment(self._layout.runs, self._payload.name)
        pids = tuple(pid for replica in replicas if (pid := _server_pid(replica)) is not None)
        address, token = without_token(base_url)
        return Target(self._payload.name, address, pids, token=token)

    def _on_progress(self, message: str, done: float, total: float) -> None:
        progress: Json = {"phase": "measuring", "message": message}
        progress |= {"done": round(done, 2), "total": total}
        if done >= 1:  # a whole batch
            seconds = time.monotonic() - self._started_at
            progress["eta_seconds"] = eta_seconds(done, total, seconds)
        self._context.progress(progress)


def _folder_of(payload: BenchmarkPayload, context: base.OperationContext) -> Path:
    if payload.output_dir is not None:
        return Path(payload.output_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    parent = make_private(context.home / "benchmarks")
    return parent / f"{payload.name}-{stamp}-{context.request_id[:8]}"


def _server_pid(replica: run_files.RunFile) -> int | None:
    try:
        with ShimClient.connect(replica.socket_path) as link:
            pid: int | None = link.status.get("pid")
            return pid or None
    except (ShimGone, TimeoutError):
        return None


def _tell(summary: Summary) -> None:
    from ..bench.table import summary_line

    base.say(f"{summary_line(summary)} (load {os.getloadavg()[0]:.1f})")
