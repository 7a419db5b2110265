# SPDX-License-Identifier: Apache-2.0
"""Measure how an environment scales: many sessions at once, from several load generators.

plan.py          what is to be measured: the grid, and how many generators it takes
sweep.py         the agenda: every cell of the grid, against every target, in turn
crew.py          the generators of a measurement, one pipe each
generator.py     one generator (a process): its share of a batch
session.py       one session, phase by phase, and its WebSocket
results.py       the server under test: its address, the processes whose CPU counts, what the
                 kernel dropped meanwhile; the results: `raw.jsonl`, `summary.csv`,
                 `summary.json`; fields as in the seed
presentation.py  the results for people: a table, figures

The protocol is that of https://github.com/burtenshaw/openenv-scaling: connect, reset, one step that
waits, close; all sessions of a batch at once, unless a window is asked for.
"""
