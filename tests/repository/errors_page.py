# SPDX-License-Identifier: Apache-2.0
"""The messages in `docs/troubleshooting.md`, from the places where the product makes them.

python -m tests.repository.errors_page      write them again

Causes and cures are written by hand. Between them stand pairs of comments: the first names classes,
and the files that they are raised in where that matters, and the messages follow it:

    <!-- errors: UnknownSource, EngineRefused in environments/engines/slurm -->
    <!-- end -->

A message belongs where the longest path names its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .error_catalog import MAKERS, RETURNING, ROOT, Catalog, Message

PAGE = ROOT / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"<!-- errors: (.*?) -->\n.*?<!-- end -->", re.DOTALL)
NOT_CLASSES = {*MAKERS, *RETURNING.values(), "ValueError", "fail"}


@dataclass(frozen=True, slots=True)
class Selector:
    """What a pair of comments asks for: a class, in files whose path begins so."""

    name: str
    path: str = ""

    def fits(self, message: Message) -> bool:
        """Whether it asks for this message."""
        return message.name == self.name and message.file.startswith(self.path)


def selectors(names: str) -> list[Selector]:
    """Read what stands in the first comment of a pair."""
    return [Selector(*each.split(" in ")) for each in re.split(r",\s+", names)]


def all_selectors(text: str) -> list[Selector]:
    """Return those of a whole page."""
    return [each for names in BLOCK.findall(text) for each in selectors(names)]


def missing(text: str, catalog: Catalog) -> set[str]:
    """Return what the page does not have: messages, and classes that are shown."""
    asked = all_selectors(text)
    named = {each.name for each in asked}
    with_texts = {message.name for message in catalog.messages if message.texts}
    # Of a class that has no text of its own, those that inherit from it are shown.
    bases = {base for name in catalog.shown for base in catalog.classes[name]}
    found = catalog.shown - named - (bases - with_texts)
    for message in catalog.messages:
        if message.texts and not any(each.fits(message) for each in asked):
            found.add(f"{message.name} in {message.file}:{message.line}")
    return found


def gone(text: str, catalog: Catalog) -> set[Selector]:
    """Return what the page asks for, and no code has any more."""
    known = catalog.shown | NOT_CLASSES
    return {
        each
        for each in all_selectors(text)
        if each.name not in known
        or ((each.path or each.name in NOT_CLASSES) and not any(map(each.fits, catalog.messages)))
    }


def with_messages(text: str, catalog: Catalog) -> str:
    """Return the page with the messages as they are now."""
    everything = all_selectors(text)

    def filled(found: re.Match[str]) -> str:
        own = selectors(found[1])
        lines = [line for each in own for line in _lines(each, everything, catalog)]
        body = "\n".join(dict.fromkeys(lines))
        return f"<!-- errors: {found[1]} -->\n\n```text\n{body}\n```\n\n<!-- end -->"

    return BLOCK.sub(filled, text)


def _lines(own: Selector, everything: list[Selector], catalog: Catalog) -> Iterator[str]:
    """Yield each message of a selector as one piece of text, hints below it."""
    told = any(message.texts for message in catalog.messages if own.fits(message))
    for message in catalog.messages:
        fitting = [each for each in everything if each.fits(message)]
        if own.fits(message) and own == max(fitting, key=lambda each: len(each.path)):
            cures = "".join(f"\n    {hint}" for hint in message.hints)
            texts = "\n".join(message.texts)
            if texts or (cures and not told and own.name not in NOT_CLASSES):
                yield f"{texts or '…'}{cures}"
    if not any(map(own.fits, catalog.messages)):
        hints = catalog.hint_of_class(own.name)
        yield "\n".join(["…", *(f"    {hint}" for hint in hints)])


if __name__ == "__main__":
    PAGE.write_text(with_messages(PAGE.read_text(), Catalog()))
