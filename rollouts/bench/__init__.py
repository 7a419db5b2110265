# SPDX-License-Identifier: Apache-2.0
"""Measure how an environment scales: many sessions at once, from several load generators.

sweep.py      the measurement: every cell of a grid against every target, by a crew of
              generators, one pipe each
generator.py  one generator (a process): its share of a batch, session by session
results.py    the server under test, its CPU time, what the kernel dropped; the results:
              `raw.jsonl`, `summary.csv`, `summary.json`, and a table

The measurement follows the protocol of https://github.com/burtenshaw/openenv-scaling.
"""
