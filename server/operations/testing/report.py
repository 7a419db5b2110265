# SPDX-License-Identifier: Apache-2.0
"""What a check has found: findings, each with its meaning and remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum

from ....system.text.json_lines import Json


class Outcome(StrEnum):
    """How a check ended; the later ones are the worse ones."""

    PASSED = "passed"
    SKIPPED = "skipped"
    WARNED = "warned"  # worth a look, and no failure
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault."""

    found: str  # what was seen, with its figures
    means: str  # what follows from it for those who use the environment
    remedy: str
    is_failure: bool = True  # otherwise it is a warning


@dataclass(slots=True)
class CheckResult:
    """The outcome of one check."""

    check: str  # its name
    summary: str = ""  # one line that says what was looked at, and what came of it
    findings: list[Finding] = field(default_factory=list)
    figures: Json = field(default_factory=dict)  # what was measured, by name
    seconds: float = 0.0
    was_skipped: bool = False  # nothing was looked at, for the reason in `summary`

    @property
    def outcome(self) -> Outcome:
        """Whether it passed."""
        if any(finding.is_failure for finding in self.findings):
            return Outcome.FAILED
        if self.findings:
            return Outcome.WARNED
        return Outcome.SKIPPED if self.was_skipped else Outcome.PASSED

    def to_json(self) -> Json:
        """The result as JSON values."""
        found = {**asdict(self), "outcome": self.outcome.value, "seconds": round(self.seconds, 3)}
        del found["was_skipped"]
        return found
