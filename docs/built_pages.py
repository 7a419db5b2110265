# SPDX-License-Identifier: Apache-2.0
"""Pages that the site is built with, from code and from data; none of them is in git.

    python docs/built_pages.py NAME      print one: http-routes.md, facts.md, habits.md, figures.md

http-routes.md   the HTTP API's routes, operations and error kinds, from the daemon's own code
facts.md         the facts of the providers, from what the conformance suite found
habits.md        the habits of environments' authors, from the suite that compares servers
figures.md       `figures/*.csv`: the rows behind the pages' figures

`mkdocs build` calls the hook at the end.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from openenvd.server.api import (
    routes_daemon,
    routes_environments,
    routes_requests,
    routes_rollouts,
)
from openenvd.server.errors import ApiError
from openenvd.server.operations.registry import OPERATIONS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

FOLDER = Path(__file__).resolve().parent


def http_routes() -> str:
    """Return the page that lists routes, operations and error kinds."""
    app = FastAPI()
    for routes in (routes_requests, routes_environments, routes_rollouts, routes_daemon):
        app.include_router(routes.router, prefix="/v1")
    app.include_router(routes_daemon.root)
    calls = [
        (f"`{method.upper()} {path}`", _parameters(call), _one_line(call["description"]))
        for path, methods in app.openapi()["paths"].items()
        for method, call in methods.items()
    ]
    operations = [
        (f"`{op.name}`", f"`{op.schedule}`", _after_a_lost_daemon(op.idempotent), op.summary)
        for op in OPERATIONS.values()
    ]
    kinds = sorted(
        (str(kind.status), f"`{kind.kind}`", _one_line(kind.__doc__ or ""))
        for kind in ApiError.__subclasses__()
    )
    return "\n".join(
        [
            "# HTTP routes\n",
            "[The HTTP API](api.md) explains them; `GET /openapi.json` has every field.\n",
            _table(("call", "query", "answer"), calls),
            "## Operations\n",
            "Of `POST /v1/requests`; `LONG` and `SHORT` say which workers may run it.\n",
            _table(("operation", "schedule", "after a lost daemon", "what it does"), operations),
            "## Error kinds\n",
            _table(("status", "kind", "meaning"), kinds),
        ]
    )


def _after_a_lost_daemon(is_idempotent: bool) -> str:
    return "queued again" if is_idempotent else "failed"


def _parameters(call: dict[str, Any]) -> str:
    found = call.get("parameters", [])
    return ", ".join(f"`{each['name']}`" for each in found if each["in"] == "query")


def facts() -> str:
    """Return the page of facts, by provider."""
    from smoke_tests.providers import page

    return page.render(page.read_results(), page.read_systems())


def habits() -> str:
    """Return the page of habits."""
    from smoke_tests.same_as_upstream import page

    return page.render()


def figures() -> str:
    """Return the page of measured rows."""
    parts = ["# Figures\n", "The rows behind [Measurements](measurements.md), which says how.\n"]
    for path in sorted((FOLDER / "figures").glob("*.csv")):
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
        parts += [f"## {path.stem.replace('-', ' ').capitalize()}\n", _table(head, rows)]
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "http-routes.md": http_routes,
    "facts.md": facts,
    "habits.md": habits,
    "figures.md": figures,
}


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *map(list, rows)]]
    return "\n".join([*lines, ""])


def render(name: str) -> str:
    """Return a page; the suites of smoke tests are found behind everything else."""
    if str(FOLDER.parent) not in sys.path:  # last, as the root has a folder `server`
        sys.path.append(str(FOLDER.parent))
    return PAGES[name]()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for name in PAGES:
        files.append(File.generated(config, name, content=render(name)))
    return files


if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in PAGES]:
        sys.exit(f"usage: python docs/built_pages.py {'|'.join(PAGES)}")
    sys.stdout.write(render(sys.argv[1]))
