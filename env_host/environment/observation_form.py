# SPDX-License-Identifier: Apache-2.0
"""Which form the installed version of upstream's package gives an observation.

Versions differ in `metadata`: 0.2.0 to 0.3.1 leave it out, later ones send it among the
observation's fields and beside them. So the installed serializer is asked once, with a probe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UPSTREAM_SERIALIZATION = "openenv.core.env_server.serialization"
_PROBE = {"probe": True}


def serialize(observation: Any) -> dict[str, Any]:
    """Dump an observation as upstream 0.10.0 does: its fields, and three of them beside them."""
    data = {
        "observation": observation.model_dump(exclude={"reward", "done"}),
        "reward": observation.reward,
        "done": observation.done,
    }
    if observation.metadata:
        data["metadata"] = observation.metadata
    return data


@dataclass(frozen=True, slots=True)
class ObservationForm:
    """How observations are dumped: by `serialize`, and in one pass where the form is known."""

    serialize: Callable[[Any], dict[str, Any]] = serialize
    has_metadata: bool | None = True  # sent, among the fields and beside them; None: unknown form


def installed_form() -> ObservationForm:
    """Return the form of upstream's package, if it has been imported; otherwise 0.10.0's."""
    module: Any = sys.modules.get(UPSTREAM_SERIALIZATION)
    if module is None:
        return ObservationForm()
    own = module.serialize_observation
    return ObservationForm(own, _has_metadata(own(module.Observation(metadata=_PROBE))))


def _has_metadata(dumped: dict[str, Any]) -> bool | None:
    rest = {"reward": None, "done": False}
    if dumped == {"observation": {"metadata": _PROBE}, "metadata": _PROBE, **rest}:
        return True
    return False if dumped == {"observation": {}, **rest} else None
