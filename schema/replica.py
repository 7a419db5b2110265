# SPDX-License-Identifier: Apache-2.0
"""The JSON of a replica that several kinds of processes write and read, each key declared once.

    RunFileData   its run file: written before it is started, read by its shim or agent
    StatusLine    its status file, and the line that its shim or agent sends at each change
    ServerInfo    part of it: the server's report when it became ready
    Capacity      part of it: the server's load, every five seconds at most

A shim imports nothing of this at run time: the types are for the type checker. In the exit of a
replica, as the database has it, two keys are added to an `ExitReason`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ..system.text.json_lines import Json

WAITING = "waiting"  # what its restart waits for
EARLIER = "earlier"  # of one that FAILED: the exits of its last status


class Process(TypedDict):
    """The identity of a process: another one with the same pid started at another time."""

    pid: int
    started_at: float


class RunFileData(TypedDict, total=False):
    """The record of a replica, or of the gateway, written before it is started."""

    version: int | str
    environment: str
    request_id: str  # the launch it belongs to
    replica_id: str
    ordinal: int  # within its launch
    number: int  # among all replicas of its environment
    created_at: float
    spec: Json  # of the launch, without variables and token
    host: str
    port: int
    address: str | None  # the gateway's, if it is behind it
    token: str | None
    memory_limit_bytes: int | None
    max_log_bytes: int
    run_dir: str
    log_path: str
    socket_path: str  # of its shim or agent
    env: dict[str, str]
    held: bool  # whether it accepts no connection yet: an earlier generation serves
    started_by: str  # the request that has started it, if that was not its launch
    # Of a replica below a shim.
    argv: list[str]
    cwd: str
    entry: str | None  # what a forked server runs instead of `argv`
    door_path: str
    links: dict[str, str]  # import names, and the folders that they stand for
    gpus: Sequence[str]  # those of which it gets some
    cgroups: str
    oom_score_adj: int
    shim: Process
    cgroup: Json | None
    # Of a replica on an engine.
    provider: str
    engine_variables: dict[str, str]  # which engine has it
    is_elsewhere: bool  # whether it is at no port of this machine
    plan: Json  # what the plans of all replicas that were started with it have in common
    # Of the gateway.
    options: Json


class ServerInfo(TypedDict, total=False):
    """The facts that a server reported when it was ready; fewer from one that is not ours."""

    ready: bool
    max_sessions: int | None
    serving: str  # a `Serving`
    shards: int
    isolate: bool
    route: str | None
    notes: list[str]
    differences: list[str]


class Capacity(TypedDict, total=False):
    """The load of a server: the counters of all shards together."""

    max_sessions: int
    waiting: int
    refused: int
    steps: int
    step_timeouts: int
    lag_p99_seconds: float
    shards: dict[str, int]  # number of shards by state
    abandoned: list[Json]  # steps that run although their sessions have ended
    left: list[Json]  # programs that sessions have left behind
    held_since: float  # the time since which the loop of a shard is blocked


class ServerReport(ServerInfo, total=False):
    """One line of the notify pipe (`protocol.py`)."""

    sessions: int
    sessions_fail: str | None
    capacity: Capacity
    shard_exit: Json
    failed: str
    log_tail: list[str]
    draining: bool
    sleeps: bool
    stopped_by: int


class StatusLine(TypedDict, total=False):
    """The known facts about a replica; before its first line, nothing."""

    event: str
    replica_id: str
    state: str  # a `State` (`environments/replica_state.py`)
    generation: int  # how many times its server has been started
    restarts: int
    wakes: int
    pid: int | None
    pid_started_at: float | None
    host: str | None
    port: int | None
    cgroup: Json | None
    held: bool  # its server gets ready, and accepts no connection before it is released
    info: ServerInfo | None
    sessions: int
    sessions_fail: str | None  # why the last attempt to create an environment failed
    capacity: Capacity | None
    failed: str | None  # why the server gave up, in its own words
    exit: Json | None  # an `ExitReason` of this generation; null while its server runs or sleeps
    last_exit: Json | None  # of any generation
    log_tail: list[str] | None  # when it has exited
    # The last exits, those for lack of memory first: facts of a child, or "server", and "reason".
    exits: list[Json]
    exit_kinds: dict[str, int]  # how many exited so, also of those that are not kept
    shard_exits: int  # how many of them were the server's children
    is_draining: bool  # stays true when it has ended
    shim: Process
    # Of a replica on an engine.
    agent: Process  # instead of `shim`: the agent is not ended for one replica
    instance: str | None  # what the engine calls it
    problem: str | None  # why the engine cannot be asked at the moment
    waiting: str | None  # why it is not ready yet
    ends_at: float | None
    replace_at: float | None
    deadline: float | None  # when draining, or the grace of stopping, is over
    # Of a replica whose run file cannot be used; the daemon alone says so.
    unwatched: bool


def max_sessions_of(status: StatusLine | None) -> int | None:
    """Return how many sessions a server can have, if it has said so.

    Its capacity is newer than what it said when it was ready: its share may have been changed.
    """
    capacity, info = (status.get("capacity"), status.get("info")) if status else (None, None)
    if capacity:
        return capacity["max_sessions"]
    return info.get("max_sessions") if info else None
