# SPDX-License-Identifier: Apache-2.0
"""Takes pictures of the dashboard for the documentation, and detects stale ones.

    page ──take──▶ Picture: its pixels, and what it shows ──save──▶ docs/images/dashboard-*.png
      └────take──▶ Picture ──differences──◀── load ─────────────────────────┘

Two pictures of one page always differ: in times, ids, figures and the machine's memory, in lines
that a longer figure wraps, and on another machine in fonts. So a picture's PNG file contains a
description (`DESCRIBE`), which omits all these and is compared exactly:

* the panels and charts in their order, with their place and width in twelfths of the page;
* the page's own texts: headings, columns, labels, buttons; digits are left out;
* the colors and sizes of each kind of element that is in both pictures.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

DESCRIBE = Path(__file__).with_name("describe.js").read_text()
KEY = "Description"  # one of PNG's standard keywords


@dataclass(frozen=True)
class Picture:
    """One picture of a page, or of a panel of it."""

    image: Image.Image
    shows: list[str]
    looks: dict[str, list[str]]  # by an element's path

    def save(self, path: Path) -> None:
        info = PngInfo()
        info.add_text(KEY, json.dumps({"shows": self.shows, "looks": self.looks}), zip=True)
        self.image.save(path, pnginfo=info, optimize=True)


def take(page: Any, panel: str = "body", **options: Any) -> Picture:
    """Take a picture of a panel; `options` are Playwright's."""
    target = page if panel == "body" else page.locator(panel)
    image = Image.open(io.BytesIO(target.screenshot(**options))).convert("RGB")
    return Picture(image, **page.evaluate(DESCRIBE, panel))


def load(path: Path) -> Picture:
    """Read a picture; a file that `save` did not write counts as empty, and so as stale."""
    image = Image.open(path)
    image.load()
    described = json.loads(image.info.get(KEY, '{"shows": [], "looks": {}}'))
    return Picture(image.convert("RGB"), **described)


def differences(kept: Picture, taken: Picture) -> list[str]:
    """Describe how the kept picture differs from the page; empty if the picture is not stale."""
    found = [f"no longer shows: {each}" for each in kept.shows if each not in taken.shows]
    found += [f"does not show: {each}" for each in taken.shows if each not in kept.shows]
    if not found and kept.shows != taken.shows:
        found.append(f"shows in another order: {kept.shows}, now {taken.shows}")
    found += [
        f"has other colors or sizes: {path}: {kept.looks[path]}, now {taken.looks[path]}"
        for path in sorted(kept.looks.keys() & taken.looks.keys())
        if not set(kept.looks[path]) & set(taken.looks[path])
    ]
    return found
