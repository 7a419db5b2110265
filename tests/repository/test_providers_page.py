# SPDX-License-Identifier: Apache-2.0
"""The page of facts says what the conformance suite of providers found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def smoke_tests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind everything else: the root has a folder `server`, as upstream's projects have."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])


# Facts that were written since a provider was last tried: the page says so of them.
EVERYWHERE = {"test_a_client_that_thinks_is_told"}
EXITS = {
    "test_memory_beyond_the_limit",
    "test_memory_of_a_child",
    "test_kill_from_outside_after_one_for_memory",
    "test_crash_of_a_session",
    "test_removed_behind_the_daemons_back",
    "test_deaths_after_the_engine_is_restarted",
}
NOT_TRIED = {"docker": {"test_crash_of_a_session"}, "swarm": EXITS, "kubernetes": EXITS}


def test_every_fact_holds_or_does_not_apply_on_every_provider() -> None:
    from smoke_tests.providers import page
    from smoke_tests.providers.under_test import PROVIDERS

    names = {fact.name for fact in page.facts()}
    assert len(names) > 40
    results = page.read_results()
    assert list(results) == list(PROVIDERS)
    for provider, result in results.items():
        tried = set(result.facts) | EVERYWHERE | NOT_TRIED.get(provider, set())
        assert tried == names, f"python -m smoke_tests.providers {provider} --write"
        assert all(map(page.is_settled, result.facts.values())), provider


def test_every_fact_is_a_sentence_and_has_a_name_of_its_own() -> None:
    from smoke_tests.providers import page

    facts = page.facts()
    assert len({fact.name for fact in facts}) == len(facts)
    for fact in facts:
        assert fact.sentence.endswith("."), fact
        assert "|" not in fact.sentence, fact


def test_every_fact_has_an_entry_for_each_other_system() -> None:
    from smoke_tests.providers import others, page

    assert set(others.read_others({fact.name for fact in page.facts()})) == {"openenv", "skypilot"}


def test_what_was_not_tried_again_is_written_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from smoke_tests.providers import __main__, page

    before = page.read_results()
    copy = tmp_path / "results.json"
    copy.write_text(page.RESULTS.read_text())
    monkeypatch.setattr(page, "RESULTS", copy)
    again = page.Result("2100-01-31", "Ray 9", before["ray"].facts)
    __main__.write({"ray": again})
    assert page.read_results() == {**before, "ray": again}
    shown = page.render(page.read_results(), page.read_systems())
    assert "`ray` on 2100-01-31 (Ray 9)" in shown


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ({"test_a": "yes: it", "test_z": "no: it"}, "skypilot: unknown fact test_z"),
        ({}, "skypilot: no entry for test_a"),
        ({"test_a": "maybe: it"}, "skypilot: test_a: unknown outcome maybe"),
        ({"test_a": "yes: that"}, "skypilot: test_a: no note that"),
        ({"test_a": "yes"}, "skypilot: test_a: no note "),
        ({"test_a": "yes: bare"}, "skypilot: test_a: note bare has no source"),
    ],
)
def test_other_systems_with_gaps_or_unknown_facts_are_refused(
    entries: dict[str, str], fault: str, tmp_path: Path
) -> None:
    from smoke_tests.providers import others

    system = {
        "title": "SkyPilot 0.14",
        "version": "0.14.1",
        "read_on": "2026-11-23",
        "files": "https://example.org/",
        "notes": {
            "it": {"why": "It is so.", "sources": ["a.py"]},
            "bare": {"why": "Nobody knows.", "sources": []},
        },
        "facts": {"test_a": "yes: it", "test_b": "?: bare"},
    }
    known = {"test_a", "test_b"}
    path = tmp_path / "others.json"
    path.write_text(json.dumps({"skypilot": system}))
    assert others.read_others(known, path)["skypilot"].outcome("test_a") == ("yes", "it")
    path.write_text(json.dumps({"skypilot": {**system, "facts": {"test_b": "?: bare", **entries}}}))
    with pytest.raises(ValueError, match=fault):
        others.read_others(known, path)
