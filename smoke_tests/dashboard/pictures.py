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

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

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


# Facts of deaths are left out: without cgroups the evidence is different.
DESCRIBE = """
(panel) => {
  const LOOKS = ["color", "backgroundColor", "borderLeftColor", "fill", "stroke", "fontSize"];
  const root = document.querySelector(panel);
  const twelfths = (pixels) => Math.round((12 * pixels) / innerWidth);
  const words = (each) => each.innerText.replace(/\\d[\\d.,]*/g, "0").replace(/\\s+/g, " ").trim();
  const named = (each) => each.tagName.toLowerCase() +
    (each.id && !/\\d/.test(each.id) ? `#${each.id}` : "") +
    [...each.classList].map((name) => `.${name}`).join("") +
    ["tone", "part"].map((key) => (each.dataset[key] ? `[${each.dataset[key]}]` : "")).join("");
  const path = (each) => (each === root ? "" : `${path(each.parentElement)} ${named(each)}`);
  const isSeen = (each) => each.checkVisibility() && !each.closest(".unseen, dialog, .skip");
  const shows = [];
  for (const each of root.querySelectorAll(
    "section, figure, h2, thead th, dt, figcaption, label, legend, summary, a.button, button")) {
    if (!isSeen(each) || each.closest("tbody, #faults dl")) continue;
    const { x, width } = each.getBoundingClientRect();
    const isBox = each.matches("section, figure");
    const place = `at ${twelfths(x)}/12, ${twelfths(width)}/12 wide`;
    shows.push(isBox ? `${named(each)} ${place}` : `${each.tagName.toLowerCase()} ${words(each)}`);
  }
  const looks = {};
  for (const each of root.querySelectorAll("*")) {
    if (!isSeen(each)) continue;
    const style = getComputedStyle(each);
    const look = LOOKS.map((name) => style[name]).join(" ");
    const known = (looks[path(each).trim()] ??= []);
    if (!known.includes(look)) known.push(look);
  }
  return { shows, looks };
}
"""
