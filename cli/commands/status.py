# SPDX-License-Identifier: Apache-2.0
"""`openenv status`: the daemon, its environments, requests and failures.

    --watch   thread ──▶ /v1/events ──▶ sets `happened` ──▶ the drawing thread clears it, and reads

`--watch` fills the terminal's screen, and waits when the daemon is lost. Between changes only the
ages are drawn again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from ...client.api import DaemonClient
from ...client.errors import ApiRefused, ClientError, ConnectionLost
from ...schema.states import EnvironmentState, RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import coloured
from ...system.text.units import plural
from .. import completion
from ..options import connect, find_target, json_option, reconnect
from ..output import phrases
from ..output.failures import environment_failure, exit_lines, replica_faults, request_failure
from ..output.output import (
    Drawn,
    Output,
    bad,
    environments_table,
    failures_table,
    faint,
    generations_table,
    lines_of,
    new_console,
    replicas_table,
    requests_table,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

REQUESTS_OF_ENVIRONMENT = 10
FAILURES_SHOWN = 3  # of one environment, in full; the table has the messages of the others
_ENDED = frozenset({"FAILED", "STOPPED"})
REDRAW_SECONDS = 1.0  # for the ages
MIN_PAUSE_SECONDS = 0.1  # between two drawings, even if much changes
RECONNECT_SECONDS = 0.5  # between two attempts to reach a daemon that is lost
MIN_REQUESTS = 3  # shown even on a low terminal


@click.command()
@click.argument(
    "target", required=False, metavar="[NAME|REQUEST_ID]",
    shell_complete=completion.environments_and_requests,
)  # fmt: skip
@click.option("--watch", is_flag=True, help="Redraw whenever something changes; Ctrl-C exits.")
@click.option(
    "--all", "shows_all", is_flag=True, help="Show all launches that failed, not only the newest."
)
@json_option
def status(target: str | None, watch: bool, shows_all: bool, output: Output) -> None:
    """Show the daemon, environments and requests, or one of them.

    Examples:
      openenv status          # environments and requests
      openenv status my_env   # one environment, its replicas and generations
      openenv status --watch  # redrawn when something changes
      openenv status --json   # for programs
    """
    if watch and (output.as_json or not sys.stdout.isatty()):
        raise click.UsageError("--watch needs a terminal, and goes without --json")
    client = connect(output)
    draw = overview if target is None else details
    found = read_status(client, target, shows_all=shows_all)
    if watch:
        _watch(client, found, partial(read_status, target=target, shows_all=shows_all), draw)
    elif output.as_json:
        output.json(found)
    else:
        output.draw(*draw(found, time.time()))


def read_status(client: DaemonClient, target: str | None, *, shows_all: bool = False) -> Json:
    """Return `{"daemon", "environments", "requests"}`, of everything or only of `target`."""
    found = client.status(all_failed=shows_all)
    if target is None:
        return found
    environment, request = find_target(client, target)
    if request is not None:
        requests = [request]
        if request.get("environment"):
            with contextlib.suppress(ApiRefused):  # taken down and removed since
                environment = client.environment(request["environment"])
    else:
        assert environment is not None
        name = environment["name"]
        requests = client.requests(environment=name, limit=REQUESTS_OF_ENVIRONMENT)
    environments = [] if environment is None else [environment]
    about = {"environments": environments, "requests": requests, "failed_launches_left_out": 0}
    return {**found, **about}


def overview(found: Json, now: float) -> list[Drawn]:
    """Return the parts to draw of everything: environments, requests, a line for each failure."""
    environments, requests = found["environments"], found["requests"]
    parts: list[Drawn] = [_headline(found["daemon"])]
    if environments:
        parts += ["", environments_table(environments, now)]
    for environment in environments:
        parts += _remarks(environment, now, is_named=False)
        for replica in environment["replicas"]:
            parts += replica_faults(environment["name"], replica, is_brief=True)
    if strays := found.get("strays"):
        parts += ["", *_strays(strays)]
    gateway = found.get("gateway") or {}
    parts += exit_lines("  gateway:", gateway, now)
    if problem := gateway.get("problem"):
        parts.append(f"  gateway: {bad(problem)}")
    if shown := [each for each in requests if each["state"] != RequestState.FAILED]:
        parts += ["", requests_table(shown, now)]
    failed, times = _failed(requests, _said(environments))
    broken = [each for each in environments if each["state"] == EnvironmentState.FAILED]
    if broken or failed:
        parts += ["", failures_table(broken, failed, times, now)]
        left_out = found.get("failed_launches_left_out")
        count = plural(left_out or 0, "earlier launch", "es")
        earlier = f"; {count} failed: openenv status --all" if left_out else ""
        parts.append(faint(f"openenv status ID explains one{earlier}"))
    if not environments and not requests:
        parts += ["", "Nothing has been launched yet. Try: openenv launch echo"]
    return parts


def details(found: Json, now: float) -> list[Drawn]:
    """Return the parts to draw of an environment or a request, with each failure's evidence."""
    environments, requests = found["environments"], found["requests"]
    said = _said(environments)
    failed, _ = _failed(requests, said)
    parts: list[Drawn] = [_headline(found["daemon"])]
    failures = []
    for environment in environments:
        parts += ["", environments_table([environment], now), *_remarks(environment, now)]
        if environment["replicas"]:
            parts += ["", replicas_table(environment["replicas"])]
        if history := environment.get("generations"):
            parts += ["", generations_table(history, now)]
        failures += environment_failure(environment)
    if requests:
        explained_below = said | {request["id"] for request in failed[:FAILURES_SHOWN]}
        parts += ["", requests_table(requests, now, explained=explained_below)]
    for request in failed[:FAILURES_SHOWN]:
        failures += request_failure(request)
    if more := failed[FAILURES_SHOWN:]:
        failures.append(f"  and {len(more)} more: openenv requests --state failed")
    return [*parts, "", "\n".join(failures)] if failures else parts


def _said(environments: list[Json]) -> set[str]:
    """Return the launches whose environment says why they failed."""
    return {
        each.get("request_id", "")
        for each in environments
        if each["state"] == EnvironmentState.FAILED and each.get("error")
    }


def _remarks(environment: Json, now: float, *, is_named: bool = True) -> Iterator[str]:
    """Describe how an environment is served, what blocks its sessions, and who can reach it."""
    name, serving = environment["name"], environment.get("serving") or {}
    if serving and is_named:
        yield faint(f"  {name}: {serving['sentence']}")
    if gpus := environment.get("gpus"):
        yield faint(f"  {name}: {gpus['each']:g} {gpus['resource'] or 'GPU'} for each replica")
    if cause := environment.get("sessions_fail"):
        yield f"  {name}: {bad('sessions fail')}: {cause} (see openenv logs {name})"
    if held := serving.get("held"):
        shards = plural(serving["shards"], "shard")
        since = phrases.duration(now - held["since"])
        yield (
            f"  {name}: {held['shards']} of {shards} blocked for {since}; a step whose "
            f"client waits is ended by --step-timeout alone (see openenv logs {name})"
        )
    if environment.get("is_exposed") and environment["state"] not in _ENDED:
        host = environment["host"]
        yield f"  {name}: listens on {host}: other machines can connect, with its token"


def _strays(strays: list[Json]) -> Iterator[str]:
    count = plural(len(strays), "stray")
    yield f"{count} without a record; openenv down --strays stops them:"
    for stray in strays:
        why = f": {stray['problem']}" if stray.get("problem") else ""
        yield f"  {stray['replica']} ({stray['provider']}){why}"


def _headline(daemon: Json) -> str:
    up = phrases.duration(daemon["uptime_seconds"])
    sessions = plural(daemon["sessions"], "session")
    return faint(f"openenvd {daemon['version']} at {daemon['address']}, up {up}, {sessions}")


def _failed(requests: list[Json], said: set[str]) -> tuple[list[Json], Counter[str]]:
    """Return the failed requests, the newest first, and how often each failed, by its id.

    A failed launch is left out if the table of environments shows its error (`said`), if its
    environment was launched successfully since, or if a later one failed for the same cause.
    """
    failed: dict[tuple[str, str | None], Json] = {}
    launched, times = set(), Counter[str]()
    for request in requests:
        is_old = request["operation"] == "launch" and request["environment"] in launched
        what = request["label"], (request.get("error") or {}).get("message")
        is_said = is_old or request["id"] in said
        if request["state"] == RequestState.FAILED and not is_said:
            times[failed.setdefault(what, request)["id"]] += 1
        if request["operation"] == "launch" and request["state"] == RequestState.SUCCEEDED:
            launched.add(request["environment"])
    return list(failed.values()), times


Read = Callable[[DaemonClient], Json]  # what is shown
Draw = Callable[[Json, float], list[Drawn]]


def _watch(client: DaemonClient, found: Json, read: Read, draw: Draw) -> None:
    from rich.live import Live

    console, changes = new_console(sys.stdout), Changes(client)
    problem: ClientError | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(console, found, draw, problem), refresh=True)
            if not changes.happened.wait(REDRAW_SECONDS):
                continue
            time.sleep(MIN_PAUSE_SECONDS)  # many changes at once are one drawing
            changes.happened.clear()  # before reading: later changes cause another drawing
            problem = changes.problem
            if problem is None:
                try:
                    found = read(changes.client)
                except ConnectionLost as exc:
                    problem = exc


def _screen(console: Console, found: Json, draw: Draw, problem: ClientError | None) -> Text:
    """Return what fits the terminal: the oldest requests are left out first."""
    from rich.text import Text

    notice = [] if problem is None else [bad(f"{problem.message}; waiting for it to come back"), ""]
    while True:
        lines = lines_of([*notice, *draw(found, time.time())], console.width)
        screen = Text.from_ansi(coloured("\n".join(lines)))
        excess = len(console.render_lines(screen, pad=False)) - console.height
        requests = found["requests"]
        if excess <= 0 or len(requests) <= MIN_REQUESTS:
            return screen
        found = {**found, "requests": requests[: max(MIN_REQUESTS, len(requests) - excess)]}


class Changes:
    """Signals each change.

    The stream breaks when the daemon exits or drops a slow reader. The thread then looks for the
    daemon until it is back, and never starts one. While there is none, `problem` says so.

    Attributes:
        client: The daemon that was found last.
        happened: Set at each change; the reader clears it before it reads.
        problem: Why there is no daemon; None while there is one.
    """

    def __init__(self, client: DaemonClient) -> None:
        self.client = client
        self.happened = threading.Event()
        self.problem: ClientError | None = None
        threading.Thread(target=self._listen, name="changes", daemon=True).start()

    def _listen(self) -> None:
        after: str | None = None
        while True:
            # When the stream ends or breaks, it is opened again.
            with contextlib.suppress(ClientError):
                for event in self.client.changes(after=after):
                    after = event.id
                    self.happened.set()
            while (problem := self._look_for_daemon()) is not None:
                self.problem = problem
                self.happened.set()
                time.sleep(RECONNECT_SECONDS)
            self.problem = None
            self.happened.set()  # for changes that were missed

    def _look_for_daemon(self) -> ClientError | None:
        """Look for the daemon again; return an error if there is none."""
        try:
            found = reconnect()
        except ClientError as exc:
            return exc
        if found is None:
            return ConnectionLost("the daemon has exited", "openenv up starts a new one")
        self.client = found
        return None
