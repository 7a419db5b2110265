# SPDX-License-Identifier: Apache-2.0
"""The errors of rollouts; `hint` says what to do next."""

from __future__ import annotations

import errno
from pathlib import Path

from ..schema.errors import HintedError
from ..system.files import disk_space
from .episodes import FailureReason

_KEPT = "finished episodes are kept"


class RolloutError(HintedError):
    """Base of the errors of rollouts."""

    # The request's kind of error. For an error with a kind, a worker logs no traceback.
    kind: str = "operation_error"
    default_hint = "look at the request's log"


class PolicyNotFound(RolloutError):
    """`--policy` names nothing that can be called."""

    kind = "invalid"
    default_hint = "--policy takes package.module:function, openai:URL or random"


class PolicyHangs(RolloutError):
    """Too many abandoned calls of a synchronous policy have not returned."""

    default_hint = "see what it waits for (py-spy dump --pid shows it); what has finished is kept"


class StageNotFound(RolloutError):
    """`--advantages` or `--filter` names nothing that can be called."""

    kind = "invalid"
    default_hint = "yours are named package.module:function, and looked for where you are"


class NoEnvironment(RolloutError):
    """No OpenEnv server answers at the address."""

    default_hint = "openenv status shows the environments that run, and their addresses"


class AllFailed(RolloutError):
    """Every episode failed."""

    default_hint = "the request's log has the reason of each failure"


class OtherRollout(RolloutError):
    """The folder holds a rollout of something else."""

    kind = "invalid"


class EpisodeFailed(RolloutError):
    """Ends one attempt of one episode, and becomes its `Failure`."""

    def __init__(self, reason: FailureReason, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.traceback = traceback  # of the policy


class OutputError(RolloutError):
    """The folder of a rollout cannot be used."""


class OutputFull(OutputError):
    """The disk, a quota or a file size limit is exhausted. Finished episodes stay."""

    default_hint = f"make room, and run the same command again: {_KEPT}"


class OutputBusy(OutputError):
    """Another process writes to the folder."""

    default_hint = "wait for the other one (openenv requests --state running), or write elsewhere"


class OutputDamaged(OutputError):
    """A file is missing, or does not match its checksum."""

    default_hint = "the same rollout again sets the file aside, and plays its episodes again"


class OutputUnwritable(OutputError):
    """The folder of rollouts cannot be opened or written."""

    default_hint = "fix the folder's permissions, or write to another one"


class WriterClosed(RolloutError):
    """A step or an episode was passed on after `close`, or after the writer failed."""


class EpisodeRefused(RolloutError):
    """An episode was finished already, or its steps are not consecutive."""


class StageError(RolloutError):
    """A stage got input that it cannot process."""

    default_hint = "look at the stage's own documentation for what it needs"


def of_os_error(exc: OSError, path: object) -> OutputError:
    """Return the typed error for an `OSError` about `path`."""
    if disk_space.is_full(exc):
        text, hint = disk_space.full(Path(str(path)))
        return OutputFull(text, f"{hint}, and run the same command again: {_KEPT}")
    if exc.errno == errno.EFBIG:
        text = f"{path} is larger than a file may be here: {exc.strerror}"
        return OutputFull(text, f"see ulimit -f, and run the same command again: {_KEPT}")
    hint = "leave the folder in its place while a rollout writes to it, and run the same one again"
    hint_if_moved = hint if exc.errno == errno.ENOENT else None
    return OutputUnwritable(f"{path} cannot be written: {exc.strerror or exc}", hint_if_moved)
