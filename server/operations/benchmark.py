# SPDX-License-Identifier: Apache-2.0
"""`benchmark`: how many sessions an environment holds at once, and how long they take.

    find address and processes ─▶ draw an action ─▶ sweep the grid ─▶ files, table

The load comes from generators, processes of their own (`rollouts/bench/`); this one waits for them,
and ends them when it is cancelled. It prints a line for each batch, which is the request's log.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...environments import run_files
from ...environments.access import ask, base_url_by_name
from ...environments.shim.client import read_status_file
from ...schema.errors import OperationFailed
from ...schema.layout import Layout, make_private
from ...schema.operation_options import BenchmarkOptions
from ...system.net.access import without_token
from ...system.text.json_lines import Json
from ...system.text.units import MB
from . import base

if TYPE_CHECKING:
    from ...rollouts.bench.results import Summary


SCHEMA_SECONDS = 30.0
MAX_REQUESTS = 200_000
MAX_WAIT_SECONDS = 3600.0


class BenchmarkPayload(base.payload_of(BenchmarkOptions)):  # type: ignore[misc]
    """The measurement: its grid and its options."""

    name: str = Field(min_length=1, description="The environment's name.")
    requests_grid: list[Annotated[int, Field(ge=1, le=MAX_REQUESTS)]] = Field(
        [32, 128, 512], min_length=1, description="Sessions at once, batch by batch."
    )
    wait_grid: list[Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS)]] = Field(
        [1.0], min_length=1, description="Seconds that a step waits."
    )
    action: Json | None = Field(
        None, description="Action of each step; by default {'wait_seconds': …}, or one drawn."
    )
    output_dir: base.AbsolutePath | None = Field(
        None,
        description="Folder for results, an absolute path; by default below the daemon's home.",
    )


class Benchmark(base.Operation):
    """Measures one environment that runs."""

    name = "benchmark"
    summary = "Measure how many sessions an environment holds at once."
    schedule = "LONG"
    idempotent = False  # half an hour of load is not repeated by itself
    max_attempts = 1
    expected_bytes = 160 * MB  # generators and results
    Payload = BenchmarkPayload

    @staticmethod
    def run(payload: BenchmarkPayload, context: base.OperationContext) -> Json:
        """`{"name", "address", "folder", "files", "max_batch", "tried", "table"}`."""
        from ...rollouts.bench import results
        from ...rollouts.bench.sweep import Plan, Sweep  # here: it imports uvloop

        runs = Layout(context.home).runs
        base_url = base_url_by_name(runs, payload.name, for_sessions=True)
        drawn = _drawn_action(base_url)
        if drawn is not None:
            payload.action, payload.wait_grid = payload.action or drawn, [0.0]  # it cannot wait
            base.say(f"each step plays {json.dumps(payload.action)} (--action '{{…}}')")
        address, token = without_token(base_url)
        replicas = run_files.of_environment(runs, payload.name)
        statuses = (read_status_file(each.run_dir) or {} for each in replicas)
        pids = tuple(pid for status in statuses if (pid := status.get("pid")))  # whose CPU counts
        target = results.Target(payload.name, address, pids, token=token)
        if payload.output_dir is not None:
            folder = Path(payload.output_dir)
        else:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            parent = make_private(context.home / "benchmarks")
            folder = parent / f"{payload.name}-{stamp}-{context.request_id[:8]}"
        base.say(f"{payload.name} is measured at {target.url}; results go to {folder}")
        started_at = time.monotonic()

        def report(message: str, done: int, total: int) -> None:
            counts: Json = {"phase": "measuring", "message": message, "done": done, "total": total}
            left = base.eta_seconds(done, total, time.monotonic() - started_at)
            context.progress(counts if left is None else counts | {"eta_seconds": left})

        def log(summary: Summary) -> None:
            base.say(f"{results.summary_line(summary)} (load {os.getloadavg()[0]:.1f})")

        plan = Plan(
            requests_grid=tuple(payload.requests_grid),
            wait_grid=tuple(payload.wait_grid),
            repetitions=payload.repetitions,
            action=payload.action,
            timeout_seconds=payload.session_timeout_seconds,
            window=payload.window or 0,
        )
        sweep = Sweep(plan, [target], folder, on_progress=report, on_summary=log)
        files = sweep.run()
        lines = results.lines_of(sweep.report)
        for line in lines:
            base.say(line)
        summaries = sweep.report.summaries
        if all(summary.error_rate == 1 for summary in summaries):
            hint = f"openenv logs {payload.name} shows what it printed"
            raise OperationFailed(f"no session works: {sweep.report.error}", hint)
        return {
            "name": payload.name,
            "address": target.url,
            "folder": str(folder),
            "files": [str(path) for path in files],
            # By wait, the largest batch of which 95 % succeeded.
            "max_batch": [
                {"wait_seconds": w, "sessions": results.max_batch(summaries, target.name, w)}
                for w in sorted({s.wait_seconds for s in summaries})
            ],
            "tried": sorted(payload.requests_grid),
            "table": lines,
        }


def _drawn_action(base_url: str) -> Json | None:
    """Return an example of the schema of actions, or a random one; None: it can wait."""
    from ...rollouts.policies.random_policy import sample

    schema = ask(base_url, "/schema", SCHEMA_SECONDS).get("action") or {}
    if "wait_seconds" in (schema.get("properties") or {}):
        return None
    examples = schema.get("examples") or [sample(schema, random.Random(0))]  # noqa: S311
    return dict(examples[0])
