# SPDX-License-Identifier: Apache-2.0
"""Values that are hidden by their form: passwords and tokens in addresses."""

from __future__ import annotations

import pytest

from openenvd.system.hidden_values import hide_credentials


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://u:p@h/x", "http://***@h/x"),
        ("http://u:a@b:c@h", "http://***@h"),
        ("http://u:p:q@h and http://v:w@i", "http://***@h and http://***@i"),
        ("in http://u:p@h://a:b", "in http://***@h://a:b"),
        (f"http://u:{'p' * 5000}@h", "http://***@h"),
        ("http://0123456789abcdef@h", "http://***@h"),
        ("http://git@h/a:b", "http://git@h/a:b"),
        ("http://h/?a=b&api_key=c", "http://h/?a=b&api_key=***"),
    ],
)
def test_passwords_and_tokens_are_hidden(value: str, shown: str) -> None:
    assert hide_credentials(value) == shown


@pytest.mark.parametrize("begin", ["", "http://u:p@"])
@pytest.mark.parametrize("piece", ["://a:", "://", "a:", "://" + "a" * 20, "?", "?token"])
def test_a_text_of_beginnings_is_read_once(begin: str, piece: str) -> None:
    """Not once for each beginning, for which pytest would not wait."""
    text = begin + "://" + piece * 400_000
    assert hide_credentials(text) == text.replace("u:p@", "***@")
