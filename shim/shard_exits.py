# SPDX-License-Identifier: Apache-2.0
"""The death of a shard, as the shim tells it: the server's facts, with an `ExitReason`.

The server is its shards' parent and goes on without them, so it is the server that waits for them;
the evidence (cgroup counters, the kernel's log) is the shim's.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ..processes.exits.diagnose import diagnose_exit, gather_evidence
from ..processes.exits.exit_reason import Detector, ExitKind, ExitReason
from ..processes.exits.oom_evidence import OomCounters
from ..system.cgroups import Cgroup


def told_of_shard(
    facts: dict[str, Any],
    before: OomCounters,
    cgroup: Cgroup | None,
    limit_bytes: int | None,
    since_monotonic: float,
) -> dict[str, Any]:
    """`facts` (see `env_host.protocol`, `shard_exit`) with `reason` and `at`."""
    if facts.get("out_of_memory"):  # over the cap of its own, which the server has put on it
        reason = _over_own_cap(facts)
    else:
        pid, status = facts["pid"], facts["wait_status"]
        evidence = gather_evidence(before, cgroup, pid, status, since_monotonic=since_monotonic)
        reason = diagnose_exit(
            replace(
                evidence,
                peak_bytes=facts.get("peak_bytes"),
                limit_bytes=limit_bytes,
                seconds=facts.get("seconds"),
            )
        )
    return {**facts, "at": time.time(), "reason": reason.to_json()}


def _over_own_cap(facts: dict[str, Any]) -> ExitReason:
    return ExitReason(
        ExitKind.OOM_KILLED,
        pid=facts["pid"],
        signal_number=9,
        detector=Detector(facts.get("detector") or Detector.CGROUP),
        limit_bytes=facts.get("limit_bytes"),
        peak_bytes=facts.get("peak_bytes"),
        seconds=facts.get("seconds"),
    )
