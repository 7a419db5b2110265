# SPDX-License-Identifier: Apache-2.0
"""The values that an engine and its agent exchange."""

from __future__ import annotations

import pytest

from openenvd.environments.engines.base import EngineRefused, ExitFacts, Labels, ReplicaPlan
from openenvd.environments.engines.exits import exit_reason
from openenvd.environments.engines.registry import MORE_VARIABLE, load
from openenvd.processes.exits.exit_reason import Detector, ExitKind, ExitReason

LABELS = Labels("home", "echo", "echo-0-1", "1")


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = ReplicaPlan(
        labels=LABELS,
        image="echo:1",
        command=("serve", "--now"),
        env={"A": "b"},
        host="127.0.0.1",
        port=21000,
        memory_bytes=7,
        options={"network": "none"},
    )
    assert ReplicaPlan.from_json(plan.to_json()) == plan


def test_labels_are_read_from_an_engines_labels_among_others() -> None:
    assert Labels.of({**LABELS.to_labels(), "maintainer": "x"}) == LABELS


def test_labels_that_are_incomplete_are_not_ours() -> None:
    labels = LABELS.to_labels()
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


def test_an_engines_word_for_a_kill_for_memory_reads_as_a_local_one() -> None:
    facts = ExitFacts(exit_code=137, is_oom=True, evidence="container 3f2a, OOMKilled")
    reason = exit_reason(facts, pid=7, stopped_by_us=False, limit_bytes=64 * 2**20)
    assert reason.detector is Detector.ENGINE
    assert reason.sentence() == (
        "was killed by the kernel for using too much memory; its limit was 64 MB "
        "(container 3f2a, OOMKilled)"
    )
    assert ExitReason.from_json(reason.to_json()) == reason


def test_what_could_not_be_started_says_why() -> None:
    facts = ExitFacts(exit_code=127, error="exec: serve: not found")
    reason = exit_reason(facts, pid=0, stopped_by_us=False, limit_bytes=None)
    assert reason.sentence() == "exec: serve: not found"


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(EngineRefused, match="'nowhere'"):
        load("nowhere")


def test_an_engine_without_its_library_is_refused_with_the_librarys_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MORE_VARIABLE, "mine=not_installed_anywhere:Engine")
    with pytest.raises(EngineRefused, match="not_installed_anywhere"):
        load("mine")
