# SPDX-License-Identifier: Apache-2.0
"""Makes foreign text safe for a terminal: what environments print, raise and are called.

A terminal obeys escape sequences in whatever it is shown: they move the cursor, rewrite what stands
above, set the title, or put text into the clipboard. `plain` removes all of them; `coloured` leaves
those of colours and styles (SGR). Tabs and the ends of lines stay.

Source: ECMA-48, 5th edition, sections 5.3 to 5.6 and 8.3.117.
"""

from __future__ import annotations

import re

_COLOUR = r"\x1b\[[0-9;:]*m"
# The beginning of a string and what is in it: another beginning ends it, so that no character is
# read as part of several strings.
_STRING = r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\x9d\x90\x98\x9e\x9f]*"
_SEQUENCE = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # a control sequence
    rf"|{_STRING}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"  # any other, or the beginning of a string that does not end
)
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
_LINE_END = re.compile(r"\r+\n?")  # a lone return would write over the line
_ALL = re.compile(f"{_SEQUENCE}|{_CONTROL}")
_ALL_BUT_COLOURS = re.compile(f"({_COLOUR})|{_SEQUENCE}|{_CONTROL}")
_BEGUN = re.compile(rf"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|{_STRING}\x1b?|\x1b[ -/]*|\r+)\Z")
_MOST_KEPT = 4096  # characters of a sequence that has begun


def plain(text: str) -> str:
    """Return the text without escape sequences and control characters."""
    return text if text.isprintable() else _ALL.sub("", _LINE_END.sub("\n", text))


def coloured(text: str) -> str:
    """Return the text with colours and styles, and no other escape sequences."""
    if text.isprintable():
        return text
    return _ALL_BUT_COLOURS.sub(lambda found: found[1] or "", _LINE_END.sub("\n", text))


class TextStream:
    """Makes a text safe that comes in pieces, which may end within an escape sequence."""

    def __init__(self, *, keeps_colours: bool) -> None:
        self._clean = coloured if keeps_colours else plain
        self._rest = ""

    def feed(self, piece: str) -> str:
        """Return what can be shown by now."""
        text, self._rest = self._rest + piece, ""
        begun = _BEGUN.search(text, max(0, len(text) - _MOST_KEPT))
        if begun is not None:
            text, self._rest = text[: begun.start()], begun[0]
        return self._clean(text)

    def end(self) -> str:
        """Return what is left."""
        text, self._rest = self._rest, ""
        return self._clean(text)
