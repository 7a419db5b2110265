# SPDX-License-Identifier: Apache-2.0
"""Branches of a session at our server, by the calls of a conversation, without upstream's client.

    a session    reset a ─▶ branch ─▶ a b c      the same answers as in a session without branches?
    2 branches                └─────▶ a b c

Each reset has a seed. The parent takes its steps first: a branch that shares something with it
would then answer otherwise.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from openenvd.client import Session
from openenvd.client.errors import SessionError

BRANCHES = 2
BEFORE = 2  # calls, the reset included
SEED = {"seed": 1}
REASON = re.compile(r"copied safely \((\w+)\)")

Calls = Sequence[tuple[str, dict[str, Any]]]


def unbranched(address: str, calls: Calls) -> list[Any]:
    """Return the answers that are compared, of a session without branches."""
    with Session(address) as session:
        _play(session, calls[:BEFORE])
        return _play(session, calls[1:])


def branched(address: str, calls: Calls) -> tuple[str, str, list[list[Any]]]:
    """Branch a session; return the tier, or `no`, the reason against a better one, and all answers.

    The answers are those of the parent and of each branch.
    """
    with Session(address) as session:
        _play(session, calls[:BEFORE])
        try:
            branches = session.branch(BRANCHES)
            tier, refusal = str(session.branched_by), session.branch_refusal
        except SessionError as exc:
            branches, tier, refusal = [], "no", session.branch_refusal or exc
        found = refusal and REASON.search(refusal.message)
        reason = found[1] if found else refusal.message if refusal else ""
        return tier, reason, [_play(each, calls[1:]) for each in (session, *branches)]


def _play(session: Session, calls: Calls) -> list[Any]:
    return [_answer(session, name, values) for name, values in calls]


def _answer(session: Session, name: str, values: dict[str, Any]) -> Any:
    try:
        if name == "state":
            return session.state()
        if name == "reset":
            return asdict(session.reset(**SEED | values))
        return asdict(session.step(_action(name, values)))
    except SessionError as exc:
        return {"raised": exc.message}


def _action(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the action of a step, or that to which upstream's client turns a call of a tool."""
    if name != "call_tool":
        return values if name == "step" else {"type": name}
    arguments = {key: value for key, value in values.items() if key != "name"}
    return {"type": name, "tool_name": values["name"], "arguments": arguments}
