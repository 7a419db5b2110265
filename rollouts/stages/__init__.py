# SPDX-License-Identifier: Apache-2.0
"""Processes episodes between collecting and training.

    sinks.py         sinks before the writer: failed episodes, groups, advantages, filters
    named_parts.py   resolves the names in `--policy`, `--advantages` and `--filter`

Everything but the sinks is a plain function or a frozen dataclass, which a user's own can replace.
"""
