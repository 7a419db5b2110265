# SPDX-License-Identifier: Apache-2.0
"""JSON texts become the values that their writers meant, whatever holds the text."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from openenvd.rollouts.answers import Answer
from openenvd.rollouts.episodes import Step, parse

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


def test_a_policy_and_a_sink_see_the_same() -> None:
    text = b'{"note": "\\ud800", "serial": 36893488147419103232}'
    step = Step(text, b"{}", None, done=False)
    assert Answer(text, None, done=False).observation == step.observation == json.loads(text)


TAKES = """
import resource, sys
from openenvd.rollouts.episodes import parse
text = b'{"payload": "' + b"x" * 20_000_000 + b'"}'
parse(b"{}")
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
value = parse(text)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


def test_parsing_allocates_little_beside_the_value() -> None:
    """Each fresh page is a fault, and the GIL is held meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", TAKES], check=True, stdout=subprocess.PIPE, text=True
    )
    assert int(done.stdout) < 1.2 * 20_000_000
