# SPDX-License-Identifier: Apache-2.0
"""The reports of an env host: `GET /capacity`, `GET /metrics`, and those through the notify pipe.

They are read from the scoreboard. Any shard answers for all of them. A shard's `state` tells apart

    starting       its process is there, and does not accept yet
    alive, busy    its loop runs; runs, but most of the time late
    wedged         its loop has been blocked for a second or more, or its process is stopped
    stopping       it ends its sessions
    absent         no process; it is about to be started
    cordoned       no process: the others are enough for the sessions there are

`GET /metrics` has the same as Prometheus metrics, read at scrape time. A new process of a
shard starts its counters from zero.

`exits`, `left` and `sessions_fail` are those of the notify pipe (`schema/protocol.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...schema.protocol import Serving
from ...system.text.json_lines import Json, encode_line
from ...system.text.prometheus import metric_family
from .scoreboard import ALIVE_SECONDS, MICROSECONDS, Counters, Field, Scoreboard

if TYPE_CHECKING:
    from ...schema.replica import Capacity

BUSY_SECONDS = 0.1  # median lag of a loop that is called busy


_GAUGES = (  # fields in lower case
    ("sessions", "Sessions open now."),
    ("max_sessions", "Sessions that may be open at once."),
    ("waiting", "Clients that wait for a session."),
    ("busy", "Calls of environments in progress."),
)
_COUNTERS = (
    ("connections", Field.CONNECTIONS, "Connections accepted."),
    ("sessions", Field.BEGUN, "Sessions begun."),
    ("refused", Field.REFUSED, "Sessions refused because there was no room."),
    ("handed_over", Field.HANDED_OVER, "Connections given to another shard."),
    ("steps", Field.STEPS, "Calls of step."),
    ("step_timeouts", Field.STEP_TIMEOUTS, "Calls that took too long."),
)
# Fields, in lower case, whose sums over all shards `/capacity` has.
_SUMMED = ("sessions", "max_sessions", "waiting", "isolated", "branches", "checkpoints")
_TOTALS = (
    ("isolated_sessions", "isolated", "Sessions with a process of their own."),
    ("branches", "branches", "Sessions that are copies of others."),
    ("checkpoints", "checkpoints", "Parked copies of sessions."),
)
_LAGS = (
    ("p50_seconds", Field.LAG_P50, "0.5"),
    ("p99_seconds", Field.LAG_P99, "0.99"),
    ("max_seconds", Field.LAG_MAX, "1"),
)


def capacity_of(scoreboard: Scoreboard, now: int) -> Json:
    """Return the answer of `/capacity`; `now` in microseconds of the scoreboard's clock."""
    exits, left, sessions_fail = scoreboard.read_news()
    return {
        **{key: sum(row[Field[key.upper()]] for row in scoreboard) for key in _SUMMED},
        "draining": any(row[Field.DRAINING] for row in scoreboard),
        "shards": [shard_of(row, now) for row in scoreboard],
        "exits": exits,
        "left": left,
        "sessions_fail": sessions_fail,
    }


def summary_of(capacity: Json) -> Capacity:
    """Summarize the shards in an answer of `/capacity`; lags are rounded to 10 ms."""
    shards = capacity["shards"]
    totals, lags = [shard["totals"] for shard in shards], [shard["lag"] for shard in shards]
    return {
        "max_sessions": capacity["max_sessions"],
        "waiting": capacity["waiting"],
        "refused": sum(each["refused"] for each in totals),
        "steps": sum(each["steps"] for each in totals),
        "step_timeouts": sum(each["step_timeouts"] for each in totals),
        "lag_p99_seconds": max((round(each["p99_seconds"], 2) for each in lags), default=0.0),
        "shards": dict(sorted(Counter(shard["state"] for shard in shards).items())),
        "abandoned": abandoned_steps(shards, time.time()),
        "left": capacity.get("left", []),
    }


def shard_of(counters: Counters, now: int) -> Json:
    """Return all fields of `/capacity` for one shard."""
    return {
        "index": counters.index,
        "pid": counters[Field.PID] or None,
        "generation": counters[Field.GENERATION],
        "state": state_of(counters, now),
        **{key: counters[Field[key.upper()]] for key, _ in _GAUGES},
        "abandoned": counters[Field.ABANDONED],
        "abandoned_seconds": abandoned_seconds(counters, now),
        "lag": {key: counters[field] / MICROSECONDS for key, field, _ in _LAGS},
        "totals": {key: counters[field] for key, field, _ in _COUNTERS},
    }


def state_of(counters: Counters, now: int) -> str:
    """Return one of the states above."""
    if counters[Field.PID] <= 0:
        return "cordoned" if counters[Field.CORDONED] else "absent"
    if counters[Field.STOPPING]:
        return "stopping"
    if not counters[Field.READY]:
        return "starting"
    if counters[Field.IDLE]:
        return "alive"
    if now - counters[Field.HEARTBEAT] >= ALIVE_SECONDS * MICROSECONDS:
        return "wedged"
    return "busy" if counters[Field.LAG_P50] >= BUSY_SECONDS * MICROSECONDS else "alive"


def note_awake(counters: Counters, now: int) -> None:
    """Write that a shard has something to do again.

    Its last heartbeat is as old as the shard's idleness, and would be taken for that of a loop that
    has been blocked since then.
    """
    counters[Field.HEARTBEAT] = now
    counters[Field.IDLE] = 0  # last: until then, nothing else is read


def blocked_seconds(counters: Counters, now: int) -> float:
    """Return how long a process has been blocked; 0: it is not."""
    is_blocked = state_of(counters, now) == "wedged"
    return (now - counters[Field.HEARTBEAT]) / MICROSECONDS if is_blocked else 0.0


def abandoned_seconds(counters: Counters, now: int) -> float:
    """Return how long the oldest abandoned call has run since its session ended; 0: none does."""
    since = counters[Field.ABANDONED_SINCE] if counters[Field.ABANDONED] else now
    return max(0, now - since) / MICROSECONDS


def abandoned_steps(shards: Sequence[Json], at: float) -> list[Json]:
    """Return the shards with abandoned steps, from the shards of `/capacity` as read at `at`."""
    rows = [(one["index"], one["abandoned"], at - one["abandoned_seconds"]) for one in shards]
    return [{"shard": i, "count": count, "since": round(t)} for i, count, t in rows if count]


def render_metrics(name: str, capacity: Json) -> str:
    """Render the whole page of the environment called `name`."""
    shards = [({"environment": name, "shard": s["index"]}, s) for s in capacity["shards"]]
    pages = []
    for key, text in _GAUGES:
        values = [(labels, s[key]) for labels, s in shards]
        pages.append(metric_family(f"openenvd_shard_{key}", text, values))
    for key, _, text in _COUNTERS:
        values = [(labels, s["totals"][key]) for labels, s in shards]
        pages.append(metric_family(f"openenvd_shard_{key}_total", text, values, "counter"))
    states = [(labels | {"state": s["state"]}, 1) for labels, s in shards]
    text = "What a shard does: alive, busy, wedged, starting, stopping, absent, cordoned."
    pages.append(metric_family("openenvd_shard_state", text, states))
    lags = [
        (labels | {"quantile": quantile}, s["lag"][key])
        for labels, s in shards
        for key, _, quantile in _LAGS
    ]
    text = "How late a shard's loop was over the last minute; 1 is the longest."
    pages.append(metric_family("openenvd_shard_loop_lag_seconds", text, lags, "summary"))
    for metric, key, text in _TOTALS:
        values = [({"environment": name}, capacity[key])]
        pages.append(metric_family(f"openenvd_{metric}", text, values))
    return "".join(pages)


log = logging.getLogger("openenvd.env_host")


class Notifier:
    """Writes the supervisor's reports into the notify pipe, if any (`schema/protocol.py`)."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.reported = 0  # sessions
        self._notes: list[str] = []
        self.differences: list[str] = []  # sentences about what differs in several processes
        self.failure: str | None = None  # to create an environment, as reported last

    def note(self, text: str) -> None:
        """Report what a user should know of this environment to the launch, and log it."""
        log.warning("%s", text)
        self._notes.append(text)

    def ready(self, *, max_sessions: int | None, serving: Serving, **how: Any) -> None:
        """Report that sessions are accepted; `how` is for people."""
        said = {"notes": self._notes, "differences": self.differences}
        how |= {name: sentences for name, sentences in said.items() if sentences}
        self.report(ready=True, max_sessions=max_sessions, serving=serving, **how)

    def report(self, **line: Any) -> None:
        """Write one of the reports of `protocol.py`."""
        if self.fd is None:
            return
        os.set_blocking(self.fd, True)
        data = encode_line(line)
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError:
            self.fd = None

    def sessions_fail(self, cause: str | None) -> None:
        """Report that an environment could not be created, or that one could again."""
        if cause != self.failure:
            self.failure = cause
            self.report(sessions_fail=cause)

    def report_if_room(self, **line: Any) -> bool:
        """Write a report, whole or not at all; False: the pipe is full."""
        try:
            if self.fd is not None:
                os.set_blocking(self.fd, False)
                os.write(self.fd, encode_line(line))
        except BlockingIOError:
            return False
        except OSError:  # the shim is gone; the sessions need not be
            self.fd = None
        return True
