# SPDX-License-Identifier: Apache-2.0
"""`prune`: remove virtual environments of projects that nothing uses."""

from __future__ import annotations

from typing import Any

from ..environments.layout import Layout
from . import base


class Prune(base.Operation):
    """Removes virtual environments; the next launch of such a project installs it again."""

    name = "prune"
    summary = "Remove projects' virtual environments that nothing uses."

    @staticmethod
    def run(payload: base.Payload, context: base.OperationContext) -> dict[str, Any]:
        """`{"removed": [{"path", "project", "used_at", "freed_bytes"}], "freed_bytes"}`."""
        from ..environments.venv.cleanup import prune

        removed = prune(Layout(context.home))
        freed = sum(each.freed_bytes for each in removed)
        return {"removed": [each.to_json() for each in removed], "freed_bytes": freed}
