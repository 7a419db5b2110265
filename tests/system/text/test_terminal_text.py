# SPDX-License-Identifier: Apache-2.0
"""Foreign text on a terminal: which sequences are removed, and that none is put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openenvd.system.text.safe_text import TextStream, coloured, plain

HARMFUL = {
    "clear the screen": "\x1b[2J",
    "move the cursor": "\x1b[1;1H",
    "a mode of the terminal": "\x1b[?1049h",
    "keys that are reported otherwise": "\x1b[>4;1m",
    "a title": "\x1b]0;owned\x07",
    "a link": "\x1b]8;;http://evil.example\x1b\\",
    "the clipboard": "\x1b]52;c;ZWNobw==\x1b\\",
    "a device control string": "\x1bP$q m\x1b\\",
    "a reset": "\x1bc",
    "a character set": "\x1b(0",
    "one byte for two": "\x9b2J",
    "a bell and a backspace": "\x07\x08",
    "a lone escape": "\x1b",
}
COLOURS = "\x1b[31mred\x1b[0m \x1b[38;5;9mred\x1b[m"
# Pieces that sequences are made of.
PIECES = st.sampled_from(
    [*HARMFUL.values(), "\x1b[31m", "\x1b", "[", "]", "2J", "m", "1", ";", "\r", "\n"]
)


@pytest.mark.parametrize("sequence", HARMFUL.values(), ids=HARMFUL)
def test_a_sequence_is_removed_and_the_text_around_it_stays(sequence: str) -> None:
    assert plain(f"before{sequence}") == "before"
    assert coloured(f"before{sequence}") == "before"
    if sequence != "\x1b":  # which takes the next character with it
        assert plain(f"before {sequence}after\tand\n") == "before after\tand\n"


def test_colours_stay_where_they_are_wanted() -> None:
    assert plain(COLOURS) == "red red"
    assert coloured(COLOURS) == COLOURS


def test_a_return_ends_a_line_instead_of_writing_over_it() -> None:
    assert plain("one\r\ntwo\rthree") == "one\ntwo\nthree"


def test_a_string_without_an_end_hides_nothing() -> None:
    assert plain("\x1b]0;title and\nmore") == "0;title and\nmore"


@given(st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join))
def test_nothing_that_is_left_is_a_sequence(text: str) -> None:
    assert "\x1b" not in plain(text)
    assert plain(coloured(text)) == plain(plain(text))
    rest = coloured(text)
    for part in rest.split("\x1b")[1:]:
        digits, is_colour, _ = part.removeprefix("[").partition("m")
        assert is_colour
        assert set(digits) <= set("0123456789;:")


@given(st.lists(PIECES | st.text(max_size=5), max_size=12), st.booleans())
def test_pieces_are_shown_as_the_whole_would_be(pieces: list[str], keeps_colours: bool) -> None:
    stream = TextStream(keeps_colours=keeps_colours)
    shown = "".join(map(stream.feed, pieces)) + stream.end()
    assert shown == (coloured if keeps_colours else plain)("".join(pieces))


def test_a_sequence_that_never_ends_is_not_kept_for_ever() -> None:
    stream = TextStream(keeps_colours=True)
    shown = "".join(stream.feed("\x1b]" + "x" * 1000) for _ in range(20))
    assert "x" * 1000 in shown


@pytest.mark.parametrize("opener", ["\x9d", "\x90", "\x1b]"])
@pytest.mark.parametrize("end", ["", "\x00"])
def test_a_text_of_beginnings_is_read_once(opener: str, end: str) -> None:
    """Not once for each beginning, for which pytest would not wait."""
    stream = TextStream(keeps_colours=True)
    text = opener * 400_000 + end
    assert "\x1b" not in plain(text) + coloured(text) + stream.feed(text) + stream.end()
