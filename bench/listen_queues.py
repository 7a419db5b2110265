# SPDX-License-Identifier: Apache-2.0
"""What the kernel dropped because a listening socket's queue was full.

Counted by the kernel for all sockets of the network namespace together, so the connections of
other programs count as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_COUNTERS = Path("/proc/net/netstat")


class Dropped(NamedTuple):
    """The kernel's counters; of one batch, by how much they grew."""

    overflows: int  # `TcpExtListenOverflows`: the queue of accepted connections was full
    drops: int  # `TcpExtListenDrops`: these, and what was dropped for any other reason

    def since(self, earlier: Dropped) -> Dropped:
        """What has been dropped since an earlier reading."""
        return Dropped(self.overflows - earlier.overflows, self.drops - earlier.drops)


def read_dropped() -> Dropped | None:
    """Return the counters as they are now; None where the system has none."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    names, values = (line.split()[1:] for line in lines if line.startswith("TcpExt:"))
    counters = dict(zip(names, map(int, values), strict=True))
    return Dropped(counters["ListenOverflows"], counters["ListenDrops"])
