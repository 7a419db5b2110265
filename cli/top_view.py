# SPDX-License-Identifier: Apache-2.0
"""What `openenv top` shows, as plain values: rows of its tables, its lines, and what has died.

Covers the words. It does *not* draw: `top_app.py` does. Nothing here imports Textual. Everything
is made from the JSON of `/v1/status` and `/v1/info`, and can be read without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..requests_db.states import EnvironmentState, ErrorKind, ReplicaState
from ..system.terminal_text import plain
from . import phrases
from .drawing import Cell, count_replicas, count_sessions, remark, state_cell

Json = dict[str, Any]

ENVIRONMENTS = ("ENVIRONMENT", "STATE", "SESSIONS", "REPLICAS", "ADDRESS")
REQUESTS = ("REQUEST", "ID", "STATE", "WHEN", "WHY")
WORKERS = ("WORKER", "KIND", "MEMORY", "RUNS")

RECENT_SECONDS = 3600.0  # requests that died earlier are history when `top` starts
_OOM = "oom_killed"  # an `ExitKind`, and an `ErrorKind`
_NOT_DEATHS = frozenset({"stopped"})
_BAR = (("workers", "#"), ("other", "="), ("free", "."), ("reserve", "-"))


@dataclass(frozen=True, slots=True)
class Seen:
    """What the daemon said: `/v1/status` and `/v1/info`, and when."""

    status: Json
    info: Json
    at: float


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: what it is about, and its cells."""

    key: str
    about: Json
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Death:
    """A process that has died, or the request that died with it."""

    key: str
    is_oom: bool
    subject: str
    message: str
    hint: str | None = None

    @property
    def line(self) -> str:
        """The death in one line, with the command that helps where one is known."""
        word = "OUT OF MEMORY" if self.is_oom else "DIED"
        advice = f"  Try: {self.hint}" if self.hint else ""
        return plain(f"{word}  {self.subject}: {self.message.partition(chr(10))[0]}{advice}")


def headline(seen: Seen, columns: int) -> str:
    """Return the daemon's address and age, and, where there is room, how late its event loop is."""
    daemon = seen.status["daemon"]
    loop = daemon.get("loop") or {}
    lag = f", loop lag p99 {loop['p99_seconds'] * 1000:.0f} ms" if loop.get("samples") else ""
    up = phrases.duration(daemon["uptime_seconds"])
    sessions = phrases.plural(daemon["sessions"], "session")
    text = f"openenvd {daemon['version']} at {daemon['address']}, up {up}, {sessions}"
    return text + lag if len(text + lag) <= columns else text


def memory_line(info: Json, columns: int) -> str:
    """Return memory as a bar and in words: workers, other processes, free, reserve."""
    sizes = _memory(info)
    total = sum(sizes.values())
    if not total:
        return "memory unknown"
    shown = {name: phrases.size(size) for name, size in sizes.items()}
    whole = f" of {phrases.size(total)}"
    text = " " + ", ".join(f"{mark} {name} {shown[name]}" for name, mark in _BAR) + whole
    if len(text) > columns - 40:
        text = f" workers {shown['workers']}, free {shown['free']}{whole}"
    length = max(10, min(60, columns - len(text) - len("memory []")))
    marks = "".join(mark * round(length * sizes[name] / total) for name, mark in _BAR)
    return f"memory [{marks[:length].ljust(length, '-')}]{text}"


def _memory(info: Json) -> dict[str, int]:
    limit = info["limits"].get("memory_bytes") or 0
    reserve = min(limit, info["plan"].get("reserve_bytes") or 0)
    free = min(limit - reserve, info["memory"]["available_bytes"])
    used = limit - reserve - free
    workers = min(used, sum(worker["rss_bytes"] or 0 for worker in info["workers"]))
    return {"workers": workers, "other": used - workers, "free": free, "reserve": reserve}


def environment_rows(environments: Sequence[Json]) -> list[Row]:
    """Return a row of each environment, and one of each of its replicas below it."""
    rows: list[Row] = []
    for environment in environments:
        problem = environment.get("sessions_fail") or (environment.get("error") or {}).get(
            "message"
        )
        cells = (
            Cell(environment["name"], {"bold": True}),
            state_cell(environment["state"]),
            Cell(count_sessions(environment), {}),
            Cell(count_replicas(environment["replicas"]), {}),
            _cell(problem or environment["address"] or "-", is_bad=bool(problem)),
        )
        rows.append(Row(f"environment {environment['name']}", environment, cells))
        rows += [_replica_row(environment, replica) for replica in environment["replicas"]]
    return rows


def _replica_row(environment: Json, replica: Json) -> Row:
    shard_exit = (replica.get("shard_exit") or {}).get("message")
    message = replica.get("message") or shard_exit
    restarts = phrases.plural(replica["restarts"], "restart") if replica["restarts"] else ""
    cells = (
        Cell(f"  {replica['ordinal']}", {}),
        state_cell(replica["state"]),
        Cell(str(replica["sessions"]), {}),
        Cell(restarts, {}),
        _cell(message or f"pid {replica['pid'] or '-'}", is_bad=bool(message)),
    )
    about = {**replica, "environment": environment["name"]}
    return Row(f"replica {replica['id']}", about, cells)


def request_rows(requests: Sequence[Json], now: float) -> list[Row]:
    """Return a row of each request: what runs and waits, with why, and what ended lately."""
    return [
        Row(
            f"request {request['id']}",
            request,
            (
                Cell(request["label"], {}),
                Cell(phrases.short_id(request["id"]), {}),
                state_cell(request["state"]),
                Cell(phrases.timing(request, now), {}),
                _cell(remark(request), is_bad=bool(request.get("error"))),
            ),
        )
        for request in requests
    ]


def worker_rows(info: Json) -> list[Row]:
    """Return a row of each worker: its kind, its memory against its cap, and what it runs."""
    cap = info["plan"].get("worker_bytes")
    of_cap = f" of {phrases.size(cap)}" if cap else ""
    return [
        Row(
            f"worker {worker['name']}",
            worker,
            (
                Cell(worker["name"], {}),
                Cell(f"{worker['schedule']} {'' if worker['guaranteed'] else 'burst'}", {}),
                Cell(f"{phrases.size(worker['rss_bytes'] or 0)}{of_cap}", {}),
                Cell(worker["label"] or "idle", {} if worker["label"] else {"dim": True}),
            ),
        )
        for worker in info["workers"]
    ]


def details(row: Row) -> str:
    """Return all that a row has to say, which its columns may have cut."""
    about = row.about
    error = about.get("error") or {}
    told = [
        about.get("label") or about.get("name") or f"{about.get('environment')} {row.key}",
        about.get("pending_reason"),
        about.get("sessions_fail"),
        error.get("message"),
        f"Try: {error['hint']}" if error.get("hint") else None,
        (about.get("retried") or {}).get("message"),
        (about.get("serving") or {}).get("sentence"),
        about.get("message"),
        (about.get("shard_exit") or {}).get("message"),
    ]
    return plain("  ".join(str(text) for text in told if text))


def deaths(status: Json, now: float) -> list[Death]:
    """Return what has died: out of memory first, and otherwise in the order of the tables."""
    found = [*_dead_requests(status["requests"], now)]
    for environment in status["environments"]:
        if environment["state"] != EnvironmentState.STOPPED:
            found += _dead_processes(environment)
    return sorted(found, key=lambda death: not death.is_oom)


def _dead_requests(requests: Sequence[Json], now: float) -> Iterator[Death]:
    for request in requests:
        error = request.get("error") or {}
        is_oom = _OOM in (error.get("kind"), (error.get("evidence") or {}).get("kind"))
        is_death = is_oom or error.get("kind") == ErrorKind.WORKER_LOST
        if is_death and now - (request["finished_at"] or now) <= RECENT_SECONDS:
            key = f"request {request['id']}"
            yield Death(key, is_oom, request["label"], error["message"], error.get("hint"))
        retried = request.get("retried")
        if retried and now - retried["at"] <= RECENT_SECONDS:
            key = f"attempt {request['id']} {retried['at']}"
            yield Death(key, True, request["label"], retried["message"])


def _dead_processes(environment: Json) -> Iterator[Death]:
    """Yield the deaths of servers, and of processes below servers that live on."""
    for replica in environment["replicas"]:
        subject = f"{environment['name']} replica {replica['ordinal']}"
        kind = (replica.get("exit") or {}).get("kind")
        if kind and kind not in _NOT_DEATHS and replica["state"] != ReplicaState.STOPPED:
            key = f"replica {replica['id']} {replica['restarts']}"
            message = replica.get("message") or "its server has exited"
            yield Death(key, kind == _OOM, subject, message)
        if shard_exit := replica.get("shard_exit"):
            is_oom = (shard_exit.get("reason") or {}).get("kind") == _OOM
            key = f"shard {replica['id']} {replica['restarts']} {shard_exit['count']}"
            yield Death(key, is_oom, subject, shard_exit["message"])


def _cell(text: str, *, is_bad: bool) -> Cell:
    return Cell(text.partition("\n")[0], {"fg": "red"} if is_bad else {})


def fit(
    headings: Sequence[str], rows: Sequence[Row], columns: int
) -> tuple[list[int], list[list[Cell]]]:
    """Return the columns' widths, and the cells cut to them; the last takes what is left.

    Args:
        headings: The table's headings.
        rows: Its rows.
        columns: How many characters a line has; each column takes a space on either side of it.
    """
    table = [[Cell(plain(cell.text), cell.style) for cell in row.cells] for row in rows]
    widths = [
        max(len(heading), *(len(line[index].text) for line in table), 0)
        for index, heading in enumerate(headings[:-1])
    ]
    least_last = max(len(headings[-1]), columns // 4)
    excess = sum(widths) + 2 * len(headings) + least_last - columns
    widths[0] = max(min(widths[0], 12), widths[0] - max(0, excess))
    widths.append(max(least_last, columns - sum(widths) - 2 * len(headings)))
    for line in table:
        line[:] = [_cut(cell, width) for cell, width in zip(line, widths, strict=True)]
    return widths, table


def _cut(cell: Cell, width: int) -> Cell:
    if len(cell.text) <= width:
        return cell
    return Cell(cell.text[: width - 1] + "~", cell.style)
