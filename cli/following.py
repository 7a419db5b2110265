# SPDX-License-Identifier: Apache-2.0
"""Queue a LONG request, and leave it or follow its log until it is final.

    submit ──▶ leave     (`--async`) print the request's id
           └─▶ follow    log, spinner and progress bar on stderr; then the result on stdout

The first Ctrl-C detaches: the request continues, and a note says how to follow it. A second one
within `SECOND_CHANCE_SECONDS` cancels it, also while the first still unwinds the stack.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import click

from ..client import following
from ..client.api import DaemonClient
from ..client.errors import ApiRefused
from ..schema.operation_options import RequestOptions
from ..schema.states import RequestState
from ..system.text.json_lines import Json
from ..system.text.safe_text import coloured, plain
from . import exit_codes, extras
from .help_pages import in_words
from .options import Command, declared_options, given_options, reconnect
from .output import phrases
from .output.failures import request_failure
from .output.output import Output, is_coloured, new_console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.status import Status

# Returns what `--json` prints of a final request beside id and error, and the lines for people.
Conclusion = Callable[[Json], tuple[Json, list[str]]]

RARE = ("timeout_seconds", "priority", "idempotency_key")  # of `RequestOptions`, through `--set`
SECOND_CHANCE_SECONDS = 2.0
BAR_WIDTH = 24  # characters
_REMEMBERED_LINES = 200  # to recognize a log tail that was shown already
_ESTIMATES = {
    "eta_seconds": "about {} left",
    "at_most_seconds": "up to {}",
}


def submit_options(command: Command) -> Command:
    """Give a command the flags of a request: `--async`, `--retry-oom` and `--yes`."""
    command = declared_options(RequestOptions, only=("retry_oom",))(command)
    return async_option(extras.yes_option(command))


async_option = click.option(
    "--async", "is_async", is_flag=True, help="Print the request's id, and return."
)


def submit(client: DaemonClient, operation: str, payload: Json, options: Json) -> Json:
    """Queue a request with the `RequestOptions` of the command line; returns the request.

    Raises `ApiRefused`: the request is invalid; the message names the command's options.
    """
    try:
        return client.submit(operation, payload, **given_options(RequestOptions, options))
    except ApiRefused as exc:
        raise in_words(exc, click.get_current_context().command) from None
    except KeyboardInterrupt:
        click.echo("\nThe request may have been queued: openenv status shows it", err=True)
        raise


def carry_out(
    client: DaemonClient,
    operation: str,
    payload: Json,
    output: Output,
    conclude: Conclusion,
    *,
    is_async: bool,
    options: Json | None = None,
) -> int:
    """Queue a request, and leave it or follow it to its end; returns the exit code."""
    request = submit(client, operation, payload, options or {})
    return leave(request, output) if is_async else follow(client, request, output, conclude)


def leave(request: Json, output: Output) -> int:
    """Print the request's id; returns the exit code."""
    if not output.as_json:
        click.echo(request["id"])
    output.json({"request_id": request["id"]})
    return exit_codes.OK


def follow(
    client: DaemonClient,
    request: Json,
    output: Output,
    conclude: Conclusion,
    *,
    is_shown_later: Callable[[str], bool] = lambda _: False,
) -> int:
    """Show the request's log until it is final, then its result; returns the exit code."""
    try:
        final = follow_request(client, request, output, is_shown_later=is_shown_later)
    except KeyboardInterrupt as exc:
        return detach(client, request, output, exc)
    result, lines = conclude(final)
    answer = {"request_id": final["id"], **result}
    if final.get("error") is not None:
        answer["error"] = final["error"]
    output.answer(answer, *lines)
    return exit_codes.of_request(final)


@dataclass
class _Screen:
    """stderr while a request runs: log lines, and on a terminal a live status line below them."""

    output: Output
    status: Status | None  # None: no terminal; the log names the phases, too
    is_shown_later: Callable[[str], bool]
    seen: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_LINES))
    rest: str = ""  # the log's text after its last complete line
    started: float = field(default_factory=time.monotonic)

    def log(self, text: str, *, is_end: bool = False) -> None:
        """Show the lines that are complete with this piece of the log."""
        *lines, self.rest = (self.rest + text).split("\n")
        if is_end and self.rest:
            lines.append(self.rest)
        for line in (each.rstrip("\r") for each in lines):
            if self.is_shown_later(line):
                continue
            self.seen.append(line)
            if self.status is None:
                self.output.note(coloured(line))
            else:
                self.status.console.print(coloured(line), soft_wrap=True)

    def phase(self, request: Json, progress: Json) -> None:
        if self.status is not None:
            self.status.update(Phase(request, progress, self.started))


@dataclass(frozen=True)
class Phase:
    """Draws the seconds since `started` (monotonic clock), a progress bar, and `phase_line`.

    The bar is left out if the total is not known.
    """

    request: Json
    progress: Json
    started: float

    def __rich__(self) -> RenderableType:
        """Return the line as of now: rich asks for it at each refresh."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        cells: list[RenderableType] = [f"{time.monotonic() - self.started:.0f} s"]
        done, total = self.progress.get("done"), self.progress.get("total")
        if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
            share = min(1.0, max(0.0, done / total))
            cells += [ProgressBar(1.0, share, width=BAR_WIDTH), f"{100 * share:.0f} %"]
        row = Table.grid(padding=(0, 1))
        for _ in cells:
            row.add_column(no_wrap=True)
        row.add_column(overflow="ellipsis")  # only this one is cut
        text = phase_line(self.request, self.progress)
        row.add_row(*cells, Text(text, no_wrap=True, overflow="ellipsis"))
        return row


def follow_request(
    client: DaemonClient,
    request: Json,
    output: Output,
    *,
    is_shown_later: Callable[[str], bool] = lambda _: False,
) -> Json:
    """Show the request's log until it is final, and its failure; skip lines that are shown later.

    Raises `KeyboardInterrupt`: the request continues, and the caller may `detach` from it.
    """
    final = request
    with _interrupted_once(), _screen(output, plain(request["label"]), is_shown_later) as screen:
        for event in following.follow(client, request["id"], reconnect=reconnect):
            match event.name:
                case "log":
                    screen.log(event.data["text"])
                case "progress" if event.data.get("message"):
                    screen.phase(final, event.data)
                case "state":
                    final = event.data
                    screen.phase(final, {})
        screen.log("", is_end=True)
    if final["state"] != RequestState.SUCCEEDED:
        output.note(*request_failure(final, shown=screen.seen))
        extras.offer(client, final, output)
    return final


run = partial(following.run, reconnect=reconnect)


def phase_line(request: Json, progress: Json) -> str:
    """Return a request's present phase and, if known, its remaining or usual time."""
    phase = progress.get("message") or request.get("pending_reason") or request["state"].lower()
    estimates = (
        f", {words.format(phrases.duration(seconds))}"
        for key, words in _ESTIMATES.items()
        if (seconds := progress.get(key)) is not None
    )
    return plain(f"{request['label']}: {phase}{next(estimates, '')}")


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the first Ctrl-C; its `args` hold the number of them.

    The second one is only counted, so that it does not interrupt the work that the first has begun.
    """
    before, interrupt, numbers = signal.getsignal(signal.SIGINT), KeyboardInterrupt(), count(1)

    def press(*_: object) -> None:
        interrupt.args = (next(numbers),)
        if interrupt.args != (2,):
            raise interrupt

    if before is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _screen(output: Output, label: str, is_shown_later: Callable[[str], bool]) -> Iterator[_Screen]:
    if not sys.stderr.isatty():
        yield _Screen(output, None, is_shown_later)
        return
    style = "cyan" if is_coloured(sys.stderr) else ""
    with new_console(sys.stderr).status(label, spinner_style=style) as status:
        yield _Screen(output, status, is_shown_later)


def detach(client: DaemonClient, request: Json, output: Output, exc: KeyboardInterrupt) -> int:
    """Leave the request running, unless a second Ctrl-C cancels it; returns the exit code."""
    short = phrases.short_id(request["id"])
    try:
        if exc.args > (1,):  # there was a second one
            raise exc
        output.note(
            f"\nDetached: {request['label']} continues. Follow it again: openenv logs -f {short}\n"
            f"Ctrl-C again within {SECOND_CHANCE_SECONDS:g} s cancels it; "
            f"later: openenv cancel {short}"
        )
        time.sleep(SECOND_CHANCE_SECONDS)
    except KeyboardInterrupt:
        output.note(f"\n{phrases.cancellation(client.cancel(request['id']))}")
    output.json({"request_id": request["id"]})
    return exit_codes.INTERRUPTED
