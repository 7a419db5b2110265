# SPDX-License-Identifier: Apache-2.0
"""Outcomes of the facts for other systems, from their source and documentation: `others.json`.

Each system has its version, the day on which it was looked up, notes (a reason and its sources),
and for each fact an outcome with the name of its note, as in `no: websocket`. No system was run.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

OTHERS = Path(__file__).resolve().parent / "others.json"
NOT_FOUND_OUT = "?"  # the only outcome that needs no source
OUTCOMES = (
    "yes",  # says its source or its documentation
    "partly",  # the note says what is missing
    "no",
    "\u2013",  # the system has nothing to which the fact applies
    NOT_FOUND_OUT,
)


@dataclass(frozen=True, slots=True)
class Note:
    """The reason why facts hold for a system or do not."""

    why: str
    sources: list[str]  # files of the system's source, or addresses


@dataclass(frozen=True, slots=True)
class System:
    """One other system."""

    title: str  # the head of its column
    version: str
    read_on: str  # YYYY-MM-DD
    files: str  # the address below which its source files are
    notes: dict[str, Note]  # by name
    facts: dict[str, str]  # outcome and name of the note, by fact

    def outcome(self, fact: str) -> tuple[str, str]:
        """Return the outcome of a fact, and the name of its note."""
        outcome, _, note = self.facts[fact].partition(": ")
        return outcome, note

    def address(self, source: str) -> str:
        return source if source.startswith("https://") else self.files + source


def read_others(known: Collection[str], path: Path = OTHERS) -> dict[str, System]:
    """Read the other systems, by name.

    Args:
        known: The names of all facts; each system has an entry for each, and no others.
        path: The file to read.

    Raises:
        ValueError: A system's entries are incomplete, or name something unknown.
    """
    systems = {
        name: System(**{**entry, "notes": {key: Note(**it) for key, it in entry["notes"].items()}})
        for name, entry in json.loads(path.read_text()).items()
    }
    faults = [f"{name}: {it}" for name, one in systems.items() for it in _faults(one, set(known))]
    if faults:
        raise ValueError(f"{path.name}: " + "; ".join(faults))
    return systems


def _faults(system: System, known: set[str]) -> list[str]:
    entries = {fact: system.outcome(fact) for fact in system.facts}
    return [
        *(f"no entry for {fact}" for fact in sorted(known - set(entries))),
        *(f"unknown fact {fact}" for fact in sorted(set(entries) - known)),
        *(
            f"{fact}: unknown outcome {it}"
            for fact, (it, _) in entries.items()
            if it not in OUTCOMES
        ),
        *(f"{fact}: no note {it}" for fact, (_, it) in entries.items() if it not in system.notes),
        *(
            f"no fact has the note {it}"
            for it in set(system.notes) - {n for _, n in entries.values()}
        ),
        *(
            f"{fact}: note {note} has no source"
            for fact, (it, note) in entries.items()
            if it != NOT_FOUND_OUT and note in system.notes and not system.notes[note].sources
        ),
    ]
