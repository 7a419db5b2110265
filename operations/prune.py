# SPDX-License-Identifier: Apache-2.0
"""`prune`: remove what was installed for projects, and that nothing uses now."""

from __future__ import annotations

from typing import Any, ClassVar

from ..environments.layout import Layout
from ..system.units import MB
from . import base


class PrunePayload(base.Payload):
    """Nothing to say."""


class Prune:
    """Removes virtual environments; the next launch of such a project installs it again."""

    name: ClassVar[str] = "prune"
    summary: ClassVar[str] = "Remove projects' virtual environments that nothing uses."
    schedule: ClassVar[str] = "SHORT"
    idempotent: ClassVar[bool] = True
    max_attempts: ClassVar[int] = 3
    expected_bytes: ClassVar[int] = 30 * MB
    leaves_bytes: ClassVar[int] = 0
    Payload: ClassVar[type[base.Payload]] = PrunePayload

    @staticmethod
    def run(payload: PrunePayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"removed": [{"path", "project", "used_at", "freed_bytes"}], "freed_bytes"}`."""
        from ..environments.venv.cleanup import prune

        removed = prune(Layout(context.home))
        freed = sum(each.freed_bytes for each in removed)
        return {"removed": [each.to_json() for each in removed], "freed_bytes": freed}
