# SPDX-License-Identifier: Apache-2.0
"""`EngineAddress`: one engine: its kind, and the variables that say which of that kind it is.

    a launch ──▶ engines/registry.py: address_here ──▶ the run file ──▶ the agent of that address
                    the launch's own variables, resolved                   its variables

Everything about a replica is asked of the engine that was used at its launch: variables of whoever
starts its agent again (a daemon, a `down`) change nothing. Two addresses of one kind have an agent
each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ADDRESS_FILE_NAME = "address.json"  # in the folder of an agent
_DIGEST_LENGTH = 8
_PLACE = "_HOST"  # ends the name of the variable that says where it is


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine that replicas run on.

    Attributes:
        engine: Its name in `--provider`.
        variables: Names and values, sorted, of what its library reads to find it.
    """

    engine: str
    variables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, engine: str, variables: Mapping[str, str]) -> EngineAddress:
        """Return the one of these variables."""
        return cls(engine, tuple(sorted(variables.items())))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineAddress:
        """Read what `to_json` wrote.

        Raises:
            LookupError, TypeError, ValueError: It is something else.
        """
        return cls.of(data["engine"], dict(data["variables"]))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, which `from_json` reads."""
        return {"engine": self.engine, "variables": dict(self.variables)}

    @property
    def key(self) -> str:
        """What its agent's files are called."""
        if not self.variables:
            return self.engine
        text = json.dumps(self.variables)
        return f"{self.engine}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]}"

    def __str__(self) -> str:
        """Return it for people: `docker at unix:///run/docker.sock`."""
        where = next(
            (text for name, text in self.variables if text and name.endswith(_PLACE)), None
        )
        return self.engine if where is None else f"{self.engine} at {where}"
