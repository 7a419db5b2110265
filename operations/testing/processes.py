# SPDX-License-Identifier: Apache-2.0
"""`processes`: what a launch, which serves sessions in several processes, makes different.

The server has read it from the project's code when it started (`env_host/environment/differences`,
and the notes on hooks and middleware); the test itself is served by one shard.
"""

from __future__ import annotations

import asyncio

from .report import CheckResult, Finding
from .subject import Subject

TABLE = "docs/compatibility.md, Differences on purpose"


async def check(subject: Subject, result: CheckResult) -> None:
    """Warn of each difference that the server has found."""
    info = (await asyncio.to_thread(subject.status)).get("info") or {}
    result.findings = [
        Finding(
            sentence,
            "a launch serves sessions otherwise than OpenEnv's server",
            TABLE,
            is_failure=False,
        )
        for sentence in dict.fromkeys([*info.get("differences", ()), *info.get("notes", ())])
    ]
    result.summary = (
        "sessions may depend on the process that serves them"
        if result.findings
        else "nothing seen that depends on the process that serves a session"
    )
