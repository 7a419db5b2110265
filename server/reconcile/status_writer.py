# SPDX-License-Identifier: Apache-2.0
"""`StatusWriter`: writes the observed states to the database, and publishes what has changed.

    set_environment, set_replica ──▶ a guarded update ──▶ its event, if anything changed ──▶ bus

The database may refuse for a while (a full disk). A write that must not be lost goes through
`insist`, unless `WorkQueue` repeats it anyway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ...requests_db.async_store import AsyncStore
from ...requests_db.errors import DatabaseError
from ...requests_db.records import Environment, Generation, Replica, RequestError
from ...requests_db.transactions import observing, submitting
from ...schema.states import EnvironmentState, GenerationState
from ...system.text.json_lines import Json
from ..events import EventBus

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # after the database or an engine refused
T = TypeVar("T")


@dataclass(eq=False)
class StatusWriter:
    """Writes, publishes and logs each change of an environment's or a replica's state."""

    store: AsyncStore
    bus: EventBus

    async def set_environment(
        self,
        name: str,
        state: EnvironmentState,
        *,
        address: str | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Write an environment's state; keep the address when None is given."""
        work, now = observing.set_environment_state, time.time()
        event = await self.store.write(work, name, state, address=address, error=error, now=now)
        if event is None:
            return
        self.bus.publish([event])
        level = logging.WARNING if error is not None else logging.INFO
        why = f": {message}" if (message := event.data.get("error")) else ""
        extra = {"environment": name, "state": state.value}
        log.log(level, "environment %s is %s%s", name, state.value, why, extra=extra)

    async def switch_generation(self, generation: Generation, spec: Json, address: str) -> bool:
        """Write that a generation serves its environment from now on; False: it was taken down."""
        work, now = observing.switch_generation, time.time()
        events = await self.store.write(work, generation, now=now, spec=spec, address=address)
        if not events:
            return False
        self.bus.publish(events)
        name, extra = generation.environment, _log_fields(generation)
        log.info("generation %d of environment %s serves", generation.number, name, extra=extra)
        return True

    async def end_generation(self, generation: Generation, error: str | None) -> None:
        """Record that a generation has ended; `error` says why it has never served."""
        state = GenerationState.RETIRED if error is None else GenerationState.FAILED
        work, now = observing.end_generation, time.time()
        self.bus.publish(await self.store.write(work, generation, state, now=now, error=error))
        why = "" if error is None else f": {error}"
        level = logging.INFO if error is None else logging.WARNING
        number, name, extra = generation.number, generation.environment, _log_fields(generation)
        text = "generation %d of environment %s is %s%s"
        log.log(level, text, number, name, state.value, why, extra=extra)

    async def adopt(self, environment: Environment) -> None:
        """Write an environment that runs, and whose launch is in no table."""
        self.bus.publish(await self.store.write(submitting.adopt, environment))
        name = environment.name
        extra = {"environment": name, "request_id": environment.request_id}
        log.warning("environment %s runs and was in no table: adopted", name, extra=extra)

    async def set_replica(self, replica: Replica) -> None:
        """Write a replica's row."""
        event = await self.store.write(observing.upsert_replica, replica, now=time.time())
        if event is None:
            return
        self.bus.publish([event])
        state = replica.state.value
        extra = {"replica": replica.id, "environment": replica.environment, "state": state}
        log.info("replica %s is %s", replica.id, state, extra=extra | {"pid": replica.pid})

    async def insist(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `work` returns, repeating it until it succeeds; logs say `what` cannot be."""
        while True:
            try:
                return await work()
            except (DatabaseError, OSError) as exc:
                log.warning("cannot %s, trying again: %s", what, exc)
            except Exception:
                log.exception("cannot %s", what)
            await asyncio.sleep(RETRY_SECONDS)


def _log_fields(generation: Generation) -> Json:
    return {"environment": generation.environment, "request_id": generation.request_id}
