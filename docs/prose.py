# SPDX-License-Identifier: Apache-2.0
"""A linter of prose: pages in plain English that stay short, and docstrings that are sentences.

    python docs/prose.py [PAGE…]      the pages of the repository by default

It prints what it refuses and what to write instead, and exits with 1. Code and what a program
prints are left out. Of docstrings it reads those that `docs/reference` shows. (The
linter `vale` of the package index fetches its program elsewhere.)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFUSED = {
    r"\b(nobody|somebody|whoever)\b": "name who",
    r"\bmend(s|ed|ing)?\b": "correct, repair, fix",
    r"\bfor ever\b|\banew\b|\bof then\b": "for as long as, again, earlier",
    r"what becomes of|lets? go of|goes on\b(?! (?:by|with))": "say what happens",
    r"is to be\b|are to be\b|is meant to\b": "must, should, will",
    r"\bthe word of\b|so many\b": "say it plainly",
    r"(?:^|[.:] )None (?:waits|is|has|of them)\b": "begin with the noun: 'No session …'",
    r"(?:^|\. )(?:What|That which) [a-z ]{1,40} is told\b": "say who reports it, and where",
    r"\blobby\b|\bdoors?\b|\bsiblings\b": "backlog, control socket, peer replicas",
    r"\bhindrance|insistent|obey|\blull\b": "the field's word",
}
OPENINGS = re.compile(r"(What|How|Whether|Where|Why|Who|Which|Tell|Say|Have|Let|Forget|Note)\b")
SHOWN = re.compile(r"^::: openenvd\.([a-z_.]+)\.[A-Za-z_]+$", re.MULTILINE)
README_WORDS, README_LINKS, DECISION_WORDS = 900, 6, 250
# Decisions with a state machine or a measurement.
LONGER = {"0001", "0007", "0014", "0023", "0025", "0026", "0031", "0032"}


def pages() -> list[Path]:
    """Return the pages; the changelog is a history."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    return sorted(page for page in found if page.name != "CHANGELOG.md")


def faults(page: Path) -> Iterator[str]:
    """Yield what is refused on a page."""
    text = page.read_text()
    words = len(text.split())
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    for pattern, instead in REFUSED.items():
        for match in re.finditer(pattern, prose, re.MULTILINE):
            yield f"{match[0].strip()!r}: {instead}"
    if page == ROOT / "README.md" and words > README_WORDS:
        yield f"{words} words, and {README_WORDS} are allowed"
    if page == ROOT / "README.md" and text.count("](") > README_LINKS:
        yield f"more than {README_LINKS} links"
    if re.match(r"\d{4}-", page.name) and page.name[:4] not in LONGER and words > DECISION_WORDS:
        yield f"{words} words, and a decision has {DECISION_WORDS}"


def docstring_faults() -> Iterator[str]:
    """Yield the docstrings of the reference's modules that begin without a subject or a verb."""
    texts = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    for name in sorted({name for text in texts for name in SHOWN.findall(text)}):
        path = ROOT / (name.replace(".", "/") + ".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                opening = OPENINGS.match(ast.get_docstring(node) or "")
                if opening:
                    place = f"{path}:{getattr(node, 'lineno', 1)}"
                    yield f"{place}: a docstring that begins with {opening[0]!r}"


def main(arguments: list[str]) -> int:
    """Print the faults of all pages, or of the named ones."""
    found = [
        f"{page}: {fault}"
        for page in (map(Path, arguments) if arguments else pages())
        for fault in faults(page)
    ]
    found += [] if arguments else docstring_faults()
    sys.stdout.write("\n".join([*found, f"{len(found)} faults", ""]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
