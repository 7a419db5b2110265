# SPDX-License-Identifier: Apache-2.0
"""Processes episodes between collecting and training.

    sinks.py         in front of a writer: failed episodes, groups, advantages, filters
    named_parts.py   what `--policy`, `--advantages` and `--filter` name
    interleave.py    the steps of one episode ─▶ training samples, each joined once

Everything but the sinks is a plain function or a frozen dataclass: pass your own where one is asked
for.
"""
