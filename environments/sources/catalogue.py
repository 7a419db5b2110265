# SPDX-License-Identifier: Apache-2.0
"""The environments that come with openenvd: a name is enough to launch them.

Whatever folder of `envs/` has an `openenv.yaml` is in the catalogue, under that folder's name.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from .manifest import MANIFEST_NAME

BUNDLED_FOLDER = Path(__file__).resolve().parents[2] / "envs"
MAX_NEAR = 3


def bundled() -> dict[str, Path]:
    """Every bundled environment: its folder by its name."""
    return {
        path.parent.name: path.parent for path in sorted(BUNDLED_FOLDER.glob(f"*/{MANIFEST_NAME}"))
    }


def near(name: str) -> list[str]:
    """Bundled names that look like `name`, the nearest first."""
    return difflib.get_close_matches(name, list(bundled()), MAX_NEAR)
