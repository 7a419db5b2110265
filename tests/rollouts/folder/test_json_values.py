# SPDX-License-Identifier: Apache-2.0
"""JSON texts become the values that their writers meant, whatever holds the text."""

from __future__ import annotations

import pytest

from openenvd.rollouts.episodes import parse

TEXT = '{"board": [1, -2.5, true, null], "said": "h\\u00e9 \\"w\\" 中"}'
VALUE = {"board": [1, -2.5, True, None], "said": 'hé "w" 中'}


@pytest.mark.parametrize("kind", [str, str.encode, lambda t: bytearray(t.encode()), None])
def test_any_bytes_like_text_is_parsed(kind: object) -> None:
    text = kind(TEXT) if callable(kind) else memoryview(TEXT.encode())
    assert parse(text) == VALUE


def test_whole_numbers_beyond_64_bits_stay_whole() -> None:
    assert parse(b"[18446744073709551616, -123456789012345678901234567890]") == [
        2**64,
        -123456789012345678901234567890,
    ]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1,]", b"01", b'"\xff"', b"\x00", b"{} {}", b"1" * 5_000]
)
def test_invalid_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # each parser has its own words
        parse(text)


def test_text_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(RecursionError):
        parse(b"[" * 100_000 + b"]" * 100_000)
