# SPDX-License-Identifier: Apache-2.0
"""Which session the scheduler prefers, where Linux gives each session one share of the processors.

With autogroups (sched(7), the default of desktops and of many servers) a hundred launches, each in
a session of its own, are a hundred competitors for a daemon that is one; `nice` counts only within
a session. What counts between them is the session's own niceness.
"""

from __future__ import annotations

from pathlib import Path

OWN_SESSION = Path("/proc/self/autogroup")


def prefer_own_session(nice: int, file: Path = OWN_SESSION) -> bool:
    """Give the session of this process another niceness; best effort.

    Args:
        nice: -20 is most preferred; lowering it needs privilege.
        file: of the autogroup.

    Returns:
        False when it was not possible, or there are no autogroups.
    """
    try:
        if not file.exists():
            return False
        file.write_text(str(nice), encoding="ascii")
    except OSError:
        return False
    return True
