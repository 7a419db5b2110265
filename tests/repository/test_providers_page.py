# SPDX-License-Identifier: Apache-2.0
"""The page of facts says what the conformance suite of providers found."""

from __future__ import annotations

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
