# SPDX-License-Identifier: Apache-2.0
"""What is done to episodes between collecting and training.

    grouping.py      a sink in front of a sink: waits for a group, then filters and weighs it
    advantages.py    rewards of a group ─▶ advantages: normalised, centred, leave-one-out
    filters.py       which episodes of a group are dropped: by length, reward, failure, sameness
    interleave.py    the steps of one episode ─▶ training samples, each joined once

Everything but the sink is a plain function or a frozen dataclass: pass your own where one is asked
for.
"""
