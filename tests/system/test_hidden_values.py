# SPDX-License-Identifier: Apache-2.0
"""Values that are hidden by their form: passwords and tokens in addresses."""

from __future__ import annotations

import pytest

from openenvd.system.hidden_values import hide_credentials, hide_secrets, hide_values


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("TOKEN=abc123 x", "TOKEN=*** x"),
        ('{"api_key": "ab cd", "has_token": true, "port": 80}',
         '{"api_key": "***", "has_token": true, "port": 80}'),
        ("openenv launch x --token s3cr3tvalue", "openenv launch x --token ***"),
        ("sent Bearer abcdefghijkl", "sent Bearer ***"),
        ("key hf_abcdefghijk in use", "key *** in use"),
        ("http://me:pw@host/x?token=abc&y=1", "http://***@host/x?token=***&y=1"),
        ("PASSWORD='a b' memory=5", "PASSWORD='***' memory=5"),
        ("nothing to see at port 8585", "nothing to see at port 8585"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_hidden_in_a_text(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown


def test_known_values_are_hidden_wherever_they_stand_but_short_and_common_ones() -> None:
    found = {"a": ["planted", 1, {"b": "x planted-more true 80 y"}]}
    hidden = hide_values(found, ["planted", "planted-more", "true", "80", "y"])
    assert hidden == {"a": ["***", 1, {"b": "x *** true 80 y"}]}


def test_a_text_of_open_quotes_is_read_once() -> None:
    text = 'a="' * 100_000
    assert hide_secrets(text) == text
