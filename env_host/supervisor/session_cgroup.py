# SPDX-License-Identifier: Apache-2.0
"""A memory cap for each isolated session: a cgroup below the replica's own, where there is one.

    /…/openenvd/replicas/my_env-0-7f3a            the replica's, made by its shim
    /…/openenvd/replicas/my_env-0-7f3a/session-5  one session's, made here before it is forked

Where there can be none, the host looks at what the session holds four times a second.
"""

from __future__ import annotations

import contextlib
import os
import re

from ...system.cgroups import Cgroup, GroupsBelow

_SESSION = re.compile(r"session-(\d+)-\d+")


class SessionGroups:
    """Makes the groups. Opened in the host, before it has forked anything."""

    def __init__(self) -> None:
        self._below = GroupsBelow()
        self.why_not = self._below.why_not
        if self.are_available:
            _remove_left(self._below.directory)

    @property
    def are_available(self) -> bool:
        """Whether sessions can have groups here."""
        return self._below.available

    def create(self, number: int, limit_bytes: int) -> Cgroup:
        """Make the group of one session.

        Raises:
            OSError: it cannot be made.
        """
        return self._below.create(f"session-{os.getpid()}-{number}", limit_bytes)


def _remove_left(directory: str) -> None:
    """Remove the groups that killed hosts have left, where no shim does."""
    for name in os.listdir(directory):  # noqa: PTH208
        match = _SESSION.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):  # noqa: PTH110
            with contextlib.suppress(OSError):
                os.rmdir(f"{directory}/{name}")  # noqa: PTH106
