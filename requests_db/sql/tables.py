# SPDX-License-Identifier: Apache-2.0
"""The tables. A fresh database has exactly these; `connections.py` brings an older one there.

Times are seconds since the epoch (DOUBLE), sizes bytes, JSON is text that `rows.py` encodes.

The database itself holds the invariants: a state is one of the enum's, only a final request has
`finished_at`, and a running one has begun an attempt. Indexes are partial, so that what a daemon
asks all day costs the same whether ten requests have ended or a million: the claim reads
`ix_requests_claim` (pending rows alone), lists of active requests `ix_requests_unfinished`, lists
of failed ones `ix_requests_failed`. Their conditions are literals, because a planner cannot match a
bound parameter to them.

`rank` is the place in the queue, smallest first: when the request arrived, on the queue's own clock
(`rows.py`), moved ahead by `PRIORITY_STEP_SECONDS` for each step of its priority. Since all waiting
requests age alike, their order never changes, so that an index has it and nothing is sorted
(`new_request` in `rows.py`).

`expectations` holds the estimates of memory that finished requests gave: one row per operation and
source, with the latest samples, so that it stays small whatever is collected elsewhere.

`generations` is the history of each environment, a row for each launch of its name. Its specs show
what was launched: tokens and secret variables are in the launches' requests alone.

`tally` is one row: how many requests are in each state, and the last event's number. Every
transaction that writes an event updates it, so a count costs one row, and numbers of events are
given out in the order of commits: a reader that resumes after number n has missed nothing below n.
It also has the seconds for which daemons have run in all. `marks` have the last event at some of
these seconds: what is old follows from them, because wall clocks may step (`retention.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from ...schema import states

metadata = MetaData(
    naming_convention={"ix": "ix_%(table_name)s_%(column_0_name)s", "ck": "%(constraint_name)s"}
)


def _one_of(column: str, values: Iterable[StrEnum]) -> str:
    listed = ", ".join(f"'{value.value}'" for value in values)
    return f"{column} IN ({listed})"


_FINAL = _one_of("state", [each for each in states.RequestState if each.is_final])
_HAS_KEY = text("idempotency_key IS NOT NULL")
_HAS_ENVIRONMENT = text("environment IS NOT NULL")

requests = Table(
    "requests",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),  # the order of arrival
    Column("id", String(16), nullable=False),
    Column("operation", Text, nullable=False),
    Column("schedule", Text, nullable=False),
    Column("payload", Text, nullable=False),  # JSON
    Column("state", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("environment", Text),
    Column("priority", Integer, nullable=False),
    Column("idempotency_key", Text),
    Column("attempts", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("timeout_seconds", Double),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("cancel_requested_at", Double),
    Column("worker", Text),
    Column("worker_pid", Integer),
    Column("worker_started_at", Double),
    Column("peak_bytes", BigInteger),
    Column("result", Text),  # JSON
    Column("error", Text),  # JSON: a RequestError
    Column("rank", Double, nullable=False, server_default=text("0")),
    # Killed for memory, it runs again with more, as often as `max_attempts` allows.
    Column("retry_oom", Integer, nullable=False, server_default=text("0")),
    Column("memory_bytes", BigInteger),  # what its next attempt is given, once one was killed
    # How often it was requeued because the daemon was lost, which is not its own failure.
    Column("lost_daemons", Integer, nullable=False, server_default=text("0")),
    Column("traceparent", Text),  # the trace that it is part of, where traces are on
    CheckConstraint(_one_of("state", states.RequestState), name="ck_requests_state"),
    CheckConstraint(_one_of("schedule", states.Schedule), name="ck_requests_schedule"),
    CheckConstraint(f"(finished_at IS NOT NULL) = ({_FINAL})", name="ck_requests_finished_at"),
    CheckConstraint(
        "state != 'RUNNING' OR (started_at IS NOT NULL AND attempts > 0)",
        name="ck_requests_started_at",
    ),
    CheckConstraint("error IS NULL OR state = 'FAILED'", name="ck_requests_error"),
    sqlite_autoincrement=True,  # a number is never given twice, even after rows were collected
)
_r = requests.c
Index("ix_requests_id", _r.id, unique=True)
Index("ix_requests_idempotency_key", _r.idempotency_key, unique=True, sqlite_where=_HAS_KEY)
Index("ix_requests_claim", _r.schedule, _r.rank, _r.seq, sqlite_where=text("state = 'PENDING'"))
Index("ix_requests_unfinished", _r.seq, sqlite_where=text("finished_at IS NULL"))
Index("ix_requests_failed", _r.seq, sqlite_where=text("state = 'FAILED'"))
Index("ix_requests_environment", _r.environment, _r.seq, sqlite_where=_HAS_ENVIRONMENT)

environments = Table(
    "environments",
    metadata,
    Column("name", Text, primary_key=True),
    Column("spec", Text, nullable=False),  # JSON
    Column("state", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("request_id", String(16)),
    Column("address", Text),
    Column("error", Text),  # JSON: a RequestError
    Column("generation", Integer, nullable=False, server_default=text("1")),
    CheckConstraint(_one_of("state", states.EnvironmentState), name="ck_environments_state"),
)

generations = Table(
    "generations",
    metadata,
    Column("environment", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("request_id", String(16), nullable=False),
    Column("spec", Text, nullable=False),  # JSON, without secrets
    Column("state", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("served_at", Double),
    Column("ended_at", Double),
    Column("error", Text),
    CheckConstraint(_one_of("state", states.GenerationState), name="ck_generations_state"),
)

replicas = Table(
    "replicas",
    metadata,
    Column("id", Text, primary_key=True),
    Column("environment", Text, nullable=False, index=True),
    Column("ordinal", Integer, nullable=False),
    Column("provider", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("run_dir", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("pid", Integer),
    Column("restarts", Integer, nullable=False),
    Column("exit", Text),  # JSON: an ExitReason
    CheckConstraint(_one_of("state", states.ReplicaState), name="ck_replicas_state"),
)

events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=False),  # numbered by `tally`
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("request_id", String(16)),
    # Indexed instead of the id: ids are random, so that each entry would touch another page.
    Column("request_seq", BigInteger, index=True),
    Column("environment", Text),
    Column("data", Text, nullable=False),  # JSON
)

tally = Table(
    "tally",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("last_event", BigInteger, nullable=False),
    *(Column(state.value.lower(), BigInteger, nullable=False) for state in states.RequestState),
    Column("run_seconds", Double, nullable=False, server_default=text("0")),
    CheckConstraint("id = 1", name="ck_tally_one_row"),
)

marks = Table(
    "marks",
    metadata,
    Column("run_seconds", Double, primary_key=True),
    Column("last_event", BigInteger, nullable=False),
)

expectations = Table(
    "expectations",
    metadata,
    Column("operation", Text, primary_key=True),
    Column("source", Text, primary_key=True),  # what an environment is made from; "" for none
    Column("samples", Text, nullable=False),  # JSON: a list of PeakSample, oldest first
    Column("updated_at", Double, nullable=False),
)
