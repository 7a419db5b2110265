# SPDX-License-Identifier: Apache-2.0
"""The values that an engine and its agent exchange."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from openenvd.environments.agent.engine_watch import exit_reason
from openenvd.environments.agent.instance import where_it_answers
from openenvd.environments.agent.replica_status import EngineReplicaStatus
from openenvd.environments.engines.base import EngineRefused, ExitFacts, Labels
from openenvd.environments.engines.docker.engine import exit_of
from openenvd.environments.engines.instance_logs import pieces_after, since_of
from openenvd.environments.engines.registry import load
from openenvd.environments.replica_state import Event
from openenvd.system.process.exit_reason import Detector, ExitKind, ExitReason

LABELS = Labels("home", "echo", "echo-0-1", "1")


def test_labels_are_read_among_others_and_are_not_ours_where_one_lacks() -> None:
    labels = {**LABELS.to_labels(), "maintainer": "x"}
    assert Labels.of(labels) == LABELS
    del labels["openenvd.home"]
    assert Labels.of(labels) is None


@pytest.mark.parametrize(
    ("facts", "stopped_by_us", "kind", "code", "number"),
    [
        (ExitFacts(exit_code=0), False, ExitKind.EXITED, 0, None),
        (ExitFacts(exit_code=3), False, ExitKind.EXITED, 3, None),
        (ExitFacts(exit_code=137), False, ExitKind.SIGNALED, None, 9),
        (ExitFacts(exit_code=143), True, ExitKind.STOPPED, None, 15),
        (ExitFacts(exit_code=255), False, ExitKind.EXITED, 255, None),
        (ExitFacts(exit_code=137, is_oom=True), False, ExitKind.OOM_KILLED, None, 9),
        (ExitFacts(exit_code=137, is_oom=True), True, ExitKind.OOM_KILLED, None, 9),
        (ExitFacts(), False, ExitKind.LOST, None, None),
        (None, False, ExitKind.LOST, None, None),
        (None, True, ExitKind.STOPPED, None, None),
    ],
)
def test_an_exit_is_explained_from_what_the_engine_knows(
    facts: ExitFacts | None,
    stopped_by_us: bool,
    kind: ExitKind,
    code: int | None,
    number: int | None,
) -> None:
    reason = exit_reason(facts, pid=7, stopped_by_us=stopped_by_us, limit_bytes=None)
    assert (reason.kind, reason.exit_code, reason.signal_number) == (kind, code, number)


def test_an_engines_kill_for_memory_reads_as_a_local_one_and_a_failed_start() -> None:
    facts = ExitFacts(exit_code=137, is_oom=True, evidence="container 3f2a, OOMKilled")
    reason = exit_reason(facts, pid=7, stopped_by_us=False, limit_bytes=64 * 2**20)
    assert reason.detector is Detector.ENGINE
    assert reason.sentence() == (
        "was killed by the kernel for using too much memory; its limit was 64 MB "
        "(container 3f2a, OOMKilled)"
    )
    assert ExitReason.from_json(reason.to_json()) == reason
    facts = ExitFacts(exit_code=127, error="exec: serve: not found")
    reason = exit_reason(facts, pid=0, stopped_by_us=False, limit_bytes=None)
    assert reason.sentence() == "exec: serve: not found"


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(EngineRefused, match="'nowhere'"):
        load("nowhere")


@pytest.mark.parametrize(
    ("oom_at", "reported_at", "kind"),
    [
        (None, None, ExitKind.OOM_KILLED),  # nothing below it was killed: it was the server itself
        (None, 100.0, ExitKind.SIGNALED),  # a shard or a program was, which its server has reported
        (100.4, 100.0, ExitKind.SIGNALED),  # the same kill, of which the engine tells later
        (140.0, 100.0, ExitKind.OOM_KILLED),  # and another one
    ],
)
def test_a_flag_for_memory_counts_only_for_a_kill_that_was_no_other_processs(
    oom_at: float | None, reported_at: float | None, kind: ExitKind
) -> None:
    facts = ExitFacts(exit_code=137, is_oom=True, oom_at=oom_at, evidence="OOMKilled")
    reason = exit_reason(
        facts, pid=7, stopped_by_us=False, limit_bytes=None, oom_reported_at=reported_at
    )
    assert reason.kind is kind
    assert ("OOMKilled" in reason.sentence()) == (kind is ExitKind.OOM_KILLED)


def test_what_the_instance_itself_has_found_out_counts() -> None:
    told = ExitReason(ExitKind.SIGNALED, pid=9, signal_number=9)
    facts = ExitFacts(exit_code=137, is_oom=True, reason=told.to_json())
    assert exit_reason(facts, pid=7, stopped_by_us=False, limit_bytes=None) == told
    stopped = exit_reason(facts, pid=7, stopped_by_us=True, limit_bytes=None)
    assert stopped.kind is not ExitKind.SIGNALED


KILLED = {"wait_status": 9, "pid": 5, "shard": 0, "sessions": 2}


def test_a_replicas_status_explains_each_report_of_its_server_once() -> None:
    status = EngineReplicaStatus()
    first = {**KILLED, "number": 1, "at": 10.0, "reason": {"kind": "oom_killed"}}
    second = {**KILLED, "number": 2, "at": 11.0, "reason": {"kind": "signaled"}}
    assert status.note_reported([first])
    assert status.note_reported([first, second])
    assert not status.note_reported([first, second])
    told = status.to_json()
    assert [one["reason"]["kind"] for one in told["exits"]] == ["oom_killed", "signaled"]
    assert (told["shard_exits"], status.oom_reported_at) == (2, 10.0)
    again = EngineReplicaStatus(told)
    assert not again.note_reported([first, second])
    again.advance(Event.EXITED, 0.0)
    again.advance(Event.START, 0.0)
    assert again.oom_reported_at is None
    assert again.note_reported([first])
    assert again.to_json()["exit_kinds"] == {"oom_killed": 2, "signaled": 1}


def container(code: int, *, oom: bool = False) -> dict[str, Any]:
    times = {"StartedAt": "2026-11-27T00:00:00.5Z", "FinishedAt": "2026-11-27T00:01:00.5Z"}
    return {"Id": "c" * 64, "State": {"ExitCode": code, "OOMKilled": oom, **times}}


def told(action: str, number: int | None = None) -> dict[str, Any]:
    attributes = {} if number is None else {"signal": str(number)}
    return {"Action": action, "Actor": {"Attributes": attributes}, "timeNano": 10**18}


@pytest.mark.parametrize(
    ("code", "oom", "events", "kind", "word"),
    [
        (137, True, [told("oom")], "oom_killed", "OOMKilled"),
        (137, True, [told("oom"), told("kill", 9)], "signaled", "docker kill"),
        (137, False, [told("kill", 9)], "signaled", "docker kill"),
        (137, False, [], "signaled", "SIGKILL"),
        (0, False, [told("kill", 15)], "lost", "SIGTERM was sent through Docker"),
        (143, False, [told("kill", 15)], "lost", "SIGTERM was sent through Docker"),
        (3, False, [told("kill", 15)], "exited", "exited with code 3"),
        (0, False, [told("kill", 10)], "exited", "exited with code 0"),  # drained: by us
    ],
)
def test_who_ended_a_container_is_told_by_dockers_events(
    code: int, oom: bool, events: list[dict[str, Any]], kind: str, word: str
) -> None:
    facts = exit_of(container(code, oom=oom), events)
    away = exit_of(container(code, oom=oom), [], math.inf).ended_by
    assert (away or "").startswith("Docker was stopped") == (code in (0, 143))
    reason = exit_reason(facts, pid=7, stopped_by_us=False, limit_bytes=None)
    assert (reason.kind, word in reason.sentence()) == (kind, True), reason.sentence()


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([None], ("own", None)),
        (["refused", None, None], ("own", None)),  # it has begun to listen in between
        (["refused", None, "refused"], ("usual", None)),
        (["refused", "not ready"], ("usual", "not ready")),
    ],
)
async def test_a_server_is_called_at_its_own_address_unless_it_answers_at_the_usual_one_alone(
    answers: list[str | None], found: tuple[str, str | None]
) -> None:
    left = iter(answers)

    async def why_not(_: str) -> str | None:
        return next(left)

    assert await where_it_answers("own", "usual", why_not) == found
    assert next(left, "all were asked") == "all were asked"


# Where an output with times is gone on in, whatever the order of its times.


def log_of(*seconds: float) -> list[bytes]:
    return [f"2026-05-04T10:00:{at:012.9f}Z {n}\n".encode() for n, at in enumerate(seconds)]


def numbers(frames: Sequence[bytes], cursor: str | None) -> list[int]:
    return [int(chunk.data) for chunk in pieces_after(frames, cursor)]


@pytest.mark.parametrize(
    "seconds",
    [
        (1.0, 2.0, 3.0),
        (1.0, 1.0, 1.0, 2.0, 2.0),  # of one time
        (1.3, 1.1, 1.4, 1.2, 1.5),  # of two streams that are copied side by side
        (1.9, 2.1, 1.95, 2.2, 2.0, 2.3),
    ],
)
def test_each_piece_is_once_on_one_side_of_any_cursor(seconds: tuple[float, ...]) -> None:
    frames = log_of(*seconds)
    cursors = [chunk.cursor for chunk in pieces_after(frames, None)]
    for place, cursor in enumerate(cursors):
        assert numbers(frames, cursor) == list(range(place + 1, len(frames)))


def test_a_log_is_asked_for_again_from_before_its_cursor_or_what_is_later() -> None:
    frames = log_of(1.0, 2.0, 3.0, 3.5, 9.0)
    assert numbers(frames[2:], "2026-05-04T10:00:02.000000000Z#1") == [2, 3, 4]
    assert numbers(frames[2:3], "2026-05-04T10:00:02.000000000Z#1") == [2]
    assert since_of(None) is None
    assert since_of("2026-05-04T10:00:02.250000000Z#3") == datetime(
        2026, 5, 4, 10, 0, 1, tzinfo=UTC
    )
