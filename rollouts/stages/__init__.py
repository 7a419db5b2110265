# SPDX-License-Identifier: Apache-2.0
"""Processes episodes between collecting and training.

    sinks.py         sinks in front of a sink: one leaves failed episodes out, the other waits for
                     a group, then filters and weighs it;
                     advantages: normalised, centred, leave-one-out; filters: by length, reward,
                     failure, sameness
    interleave.py    the steps of one episode ─▶ training samples, each joined once

Everything but the sinks is a plain function or a frozen dataclass: pass your own where one is asked
for.
"""
