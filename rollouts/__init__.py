# SPDX-License-Identifier: Apache-2.0
"""Drives many sessions at once, and writes what came back.

    collector ──reserve──▶ ByteBudget ◀──release── writer thread ──▶ parts, journal, manifest
        │  steps, one by one                            ▲                     │
        └──put_step, finish──▶ stages ──────────────────┘                  readers, senders

Every byte between a session and the disk is counted against one budget, so that memory stays flat
however slow the disk is. An unfinished episode is never visible; a finished one exists once.
"""
