# SPDX-License-Identifier: Apache-2.0
"""Looks at every page of the built site in headless Chromium, 1280 and 400 pixels wide.

    python docs/check_site.py SITE

It names code, tables and pages that are cut, and pictures that are not there, and exits with 1.
Tables may scroll in the narrow window.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from playwright.sync_api import sync_playwright

WIDTHS = (1280, 400)
CUT = """() => {
  const found = document.documentElement.scrollWidth > window.innerWidth ? ['the page'] : [];
  for (const code of document.querySelectorAll('pre code'))
    if (code.scrollWidth > code.clientWidth + 1) found.push('code: ' + code.innerText.slice(0, 60));
  for (const table of document.querySelectorAll('.md-typeset__scrollwrap'))
    if (window.innerWidth > 1000 && table.scrollWidth > table.clientWidth + 1)
      found.push('table: ' + table.innerText.slice(0, 60));
  for (const picture of document.images) if (!picture.naturalWidth) found.push(picture.src);
  return found;
}"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without a log."""

    def log_message(self, *_args: object) -> None:
        """Print nothing."""


def main(site: Path) -> int:
    """Print what is cut."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(str(page.relative_to(site).parent) for page in site.rglob("index.html"))
    faults = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            for name in pages:
                page.goto(f"http://127.0.0.1:{server.server_port}/{name}/")
                faults += [f"{name} at {width} px: {what!r}" for what in page.evaluate(CUT)]
        browser.close()
    sys.stdout.write("\n".join([*faults, f"{len(pages)} pages, {len(faults)} faults", ""]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
