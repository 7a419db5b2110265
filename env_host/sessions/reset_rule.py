# SPDX-License-Identifier: Apache-2.0
"""`ResetRule`: whether a session may begin with a step.

Upstream's clients connect again by themselves, in silence, when their connection was closed while
they were not waiting for an answer: their next step would be taken in a new environment. Nothing in
the protocol tells such a client from a new one. So each session that we have ended may explain one
session that begins with a step, wherever it arrives:

    a process exits with n sessions ─▶ supervisor: LOST += n of its row ─┐
    idle sessions are ended ─────────▶ shard: LOST += 1 of its own row ──┼▶ scoreboard
    a step before a reset is refused ▶ shard: RETURNED += 1 of its row ──┘   (LOST > RETURNED?)

How many have not returned is reported to the shim, which tells the next server (row 0 begins with
them and with the sessions that the last one had), and writes it down for the shim after it.

Why not otherwise: `docs/decisions/0024-step-before-reset.md`.
"""

from __future__ import annotations

from ..ipc.scoreboard import Counters, Field, Scoreboard, sessions_to_return


class ResetRule:
    """Decides about steps before a session's first reset."""

    def __init__(self, wanted: bool | None, scoreboard: Scoreboard, own: Counters) -> None:
        """Refuse all of them or none, as `wanted`; None: those that a lost session may explain."""
        self._wanted = wanted
        self._scoreboard = scoreboard
        self._own = own

    def note_lost(self) -> None:
        """Count a session that is ended while its client does not wait for an answer."""
        self._own.add(Field.LOST)

    def refuses_step(self) -> bool:
        """Tell whether a session must not begin with the step that it got; asked once for each."""
        if self._wanted is not None:
            return self._wanted
        if not sessions_to_return(self._scoreboard):
            return False
        self._own.add(Field.RETURNED)
        return True
