# SPDX-License-Identifier: Apache-2.0
"""The daemon's parts: made, connected, started, and stopped in the opposite order.

    database (migrate, recover) ──▶ plan, memory estimates ──▶ executor ◀──▶ dispatcher
                                └─▶ stores ──▶ reconciler, submitter ──▶ `Dependencies` ──▶ API

Requests that an earlier daemon left RUNNING are recovered before anything is made that could claim
them: queued again when their operation is idempotent, failed as lost otherwise. Environments of an
earlier daemon are adopted before the API answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from ..environments.preparation.checkout import fetched_commits
from ..executor.executor import BurstableExecutor
from ..executor.policy.plan import Plan
from ..executor.spawning.zygote import PreforkedZygote
from ..executor.supervisor.memory import sweep_orphans
from ..requests_db.async_store import AsyncStore
from ..requests_db.connections import WriteConnection, open_database
from ..requests_db.errors import DatabaseError
from ..requests_db.sql import queries
from ..requests_db.sql.rows import QueueClock
from ..requests_db.transactions.dispatching import recover
from ..requests_db.transactions.retention import MAX_ESTIMATES
from ..schema.settings import Paths, Settings
from ..schema.states import RequestState, Schedule
from ..system.memory.limits import Limits
from ..system.process.loop_lag import EventLoopLagMonitor
from .api.dependencies import Dependencies
from .dispatch.dispatcher import Dispatcher
from .dispatch.memory_estimates import MemoryEstimates, plan_for
from .dispatch.request_traces import RequestTraces
from .dispatch.running import DaemonTasks, DispatchContext
from .dispatch.submission import Submitter
from .errors import DaemonError
from .events import EventBus
from .operations import registry
from .reconcile.reconciler import Reconciler
from .tracing import start, stop

log = logging.getLogger(__name__)


@asynccontextmanager
async def running_parts(
    paths: Paths,
    settings: Settings,
    limits: Limits,
    identity: dict[str, Any],
    zygote: PreforkedZygote | None,
    stopping: asyncio.Event,
) -> AsyncIterator[Dependencies]:
    """Run everything but HTTP within the block, in a home whose lock is held.

    `identity` is the content of `daemon.json`; the API's streams end with `stopping`, which is set
    when the block ends.

    Raises:
        DaemonError: the database cannot be used, or a daemon does not fit on this machine.
    """
    loop = asyncio.get_running_loop()
    bus = EventBus(loop)
    provider, identity["traces"] = start()
    traces = RequestTraces(provider)
    with _database_failure_as_reason():
        open_database(paths.database)
        dispatch_store = WriteConnection(paths.database, syncs=settings.syncs)
        store = AsyncStore(paths.database, syncs=settings.syncs)
        _recover(dispatch_store)
        plan, estimates = _learned_plan(limits, settings, dispatch_store)
        clock = QueueClock(dispatch_store.read(queries.LATEST_ARRIVAL))
    dispatcher: Dispatcher
    executor = BurstableExecutor(
        plan,
        preload=registry.PRELOAD,
        home=str(paths.home),
        on_event=lambda event: dispatcher.deliver(event),
        cancel_grace_seconds=settings.cancel_grace_seconds,
        preforked_zygote=zygote,
    )
    submitter: Submitter
    reconciler = Reconciler(
        store, bus, paths, submit=lambda *asked: submitter.submit_own(*asked), fork=executor.fork
    )
    tasks = DaemonTasks(
        loop, paths, lambda event: dispatcher.report(event), reconciler.changes.carry_out
    )
    context = DispatchContext(
        dispatch_store,
        executor,
        bus.publish_from_thread,
        {op.name: registry.dotted_name(op) for op in registry.OPERATIONS.values()},
        paths,
        settings,
        estimates,
        plan.budget_bytes,
        clock,
        traces=traces,
        tasks=tasks,
    )
    dispatcher = Dispatcher(context)
    fetched = partial(fetched_commits, paths)
    submitter = Submitter(store, dispatcher, bus, settings, clock, traces, fetched)
    lag = EventLoopLagMonitor("the daemon's loop")
    try:
        executor.start()  # first: it forks the shims of environments that it adopts
        with _database_failure_as_reason():
            await reconciler.start()
        dispatcher.start()
        lag.start(paused=True)
        yield Dependencies(
            paths=paths,
            settings=settings,
            identity=identity,
            limits=asdict(limits),
            store=store,
            executor=executor,
            reconciler=reconciler,
            dispatcher=dispatcher,
            submitter=submitter,
            bus=bus,
            lag=lag,
            stopping=stopping,
        )
    finally:
        stopping.set()
        await tasks.stop()
        await reconciler.stop()
        await asyncio.to_thread(dispatcher.stop)  # first: so that what is killed stays RUNNING
        await asyncio.to_thread(executor.stop, settings.cancel_grace_seconds)
        lag.stop()
        await store.close()
        dispatch_store.close()
        if provider is not None:
            await asyncio.to_thread(stop, provider)


def _recover(store: WriteConnection) -> None:
    """End what is left of an earlier daemon's workers, and settle their requests."""
    workers = [(r.worker_pid, r.worker_started_at) for r in store.read(queries.RUNNING)]
    survivors = sweep_orphans((p, s) for p, s in workers if p is not None and s is not None)
    if survivors:
        log.warning("killed %d workers of an earlier daemon", len(survivors))
    idempotent = {op.name for op in registry.OPERATIONS.values() if op.idempotent}
    states = [each.state for each in store.write(recover, time.time(), idempotent=idempotent)]
    if states:
        requeued, failed = map(states.count, (RequestState.PENDING, RequestState.FAILED))
        log.warning("recovered: %d requests queued again, %d failed", requeued, failed)


def _learned_plan(
    limits: Limits, settings: Settings, store: WriteConnection
) -> tuple[Plan, MemoryEstimates]:
    """Plan by the peaks of earlier runs; if that leaves no room, by what operations declare."""
    known = store.read(queries.memory_estimates(MAX_ESTIMATES))
    plan = plan_for(limits, settings, registry.expected_bytes())
    estimates = MemoryEstimates(registry.OPERATIONS, known, most_bytes=plan.budget_bytes)
    shares = {schedule.value: estimates.typical(schedule) for schedule in Schedule}
    with contextlib.suppress(DaemonError):
        plan = plan_for(limits, settings, shares)
    return plan, estimates


@contextmanager
def _database_failure_as_reason() -> Iterator[None]:
    """A database that cannot be read or written is a reason not to start."""
    try:
        yield
    except DatabaseError as exc:
        raise DaemonError("database", str(exc), getattr(exc, "hint", None)) from exc
