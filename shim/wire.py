# SPDX-License-Identifier: Apache-2.0
"""The wire between a shim and its clients: one JSON object a line. Light: a shim imports it.

Shim to client, on connecting and on every change:

    {"event": "status", "replica_id", "state": "starting|ready|exited|stopping|stopped",
     "pid", "pid_started_at", "generation", "restarts", "ready_at", "host", "port", "sessions",
     "info": {ready line}, "capacity": {as the server told last}, "exit": ExitReason,
     "last_exit": ExitReason, "failed": str, "log_tail": [only when exited], "oom_kills": n,
     "shim": {pid, started_at}, "cgroup",
     "shard_exits": n, "last_shard_exit": {facts of the server's own child, "reason", "at"}}

`exit` is of the server of this generation, null while it runs; `last_exit` stays. Client to shim:

    {"op": "start"}                          start the server again; ignored while one runs
    {"op": "stop", "grace_seconds": 5.0}     end everything, say "stopped", exit
    {"op": "listener"}                       answered {"event": "listener"} with the descriptor
    anything else                            answered {"event": "error", "message"}

Who speaks: `clients.py` here, `client.py` and the daemon there.
"""

from __future__ import annotations

from ..system.json_lines import decode_line, encode_line

DEFAULT_GRACE_SECONDS = 5.0


def read_order(line: bytes) -> tuple[object, float]:
    """What a client asks for, whatever that is, and the grace that a stop would give.

    Raises:
        ValueError: when it is no message.
    """
    message = decode_line(line)
    try:
        grace_seconds = float(message.get("grace_seconds", DEFAULT_GRACE_SECONDS))
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"grace_seconds: {exc}") from exc
    return message.get("op"), grace_seconds


def error_line(message: str) -> bytes:
    """The answer to what cannot be understood."""
    return encode_line({"event": "error", "message": message})
