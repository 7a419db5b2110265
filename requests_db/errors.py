# SPDX-License-Identifier: Apache-2.0
"""Everything that can go wrong with the database.

`hint` says what to do next. A transaction that raised has been rolled back.
"""

from __future__ import annotations

from ..schema.errors import HintedError


class DatabaseError(HintedError):
    """The database cannot be used, or a transaction has failed without any effect."""

    default_hint = "look at the daemon's log; `openenv check` examines the state folder"


class DatabaseFull(DatabaseError):
    """The disk is full. Nothing is lost; the next write after space is freed succeeds."""

    default_hint = "free some space on that disk; no restart is needed"


class DatabaseUnwritable(DatabaseError):
    """The file or its folder cannot be opened or written."""

    default_hint = "fix the folder's permissions, or point OPENENV_HOME at another folder"


class DatabaseCorrupt(DatabaseError):
    """The file is damaged, or was never a database of ours."""

    default_hint = (
        "stop the daemon and move the file away together with its -wal and -shm files; "
        "the next start makes a new one, and adopts the environments that run"
    )


class DatabaseBusy(DatabaseError):
    """Another process has held the database for longer than we wait."""

    default_hint = "close other programs that have the file open (a sqlite3 shell, a backup)"


class DatabaseTooNew(DatabaseError):
    """A newer version has migrated the database; this one cannot read it safely."""

    default_hint = "upgrade openenvd, or point OPENENV_HOME at another folder"
