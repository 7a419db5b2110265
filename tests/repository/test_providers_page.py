# SPDX-License-Identifier: Apache-2.0
"""`docs/providers.md` says what the conformance suite of providers found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def smoke_tests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind everything else: the root has a folder `server`, as upstream's projects have."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])


def test_the_table_is_that_of_the_committed_results() -> None:
    from smoke_tests.providers import page

    text = page.PAGE.read_text()
    found = page.with_table(text, page.read_results())
    assert text == found, "write it again: python -m smoke_tests.providers.page"


def test_every_fact_holds_or_does_not_apply_on_every_provider() -> None:
    from smoke_tests.providers import page

    names = {fact.name for fact in page.facts()}
    assert len(names) > 40
    results = page.read_results()
    assert "local" in results
    for provider, outcomes in results.items():
        assert set(outcomes) == names, f"python -m smoke_tests.providers {provider} --write"
        settled = [each for each in outcomes.values() if page.is_settled(each)]
        assert len(settled) == len(outcomes), provider


def test_every_fact_is_a_sentence_and_has_a_name_of_its_own() -> None:
    from smoke_tests.providers import page

    facts = page.facts()
    assert len({fact.name for fact in facts}) == len(facts)
    for fact in facts:
        assert fact.sentence.endswith("."), fact
        assert "|" not in fact.sentence, fact
