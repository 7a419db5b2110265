# SPDX-License-Identifier: Apache-2.0
"""`openenv requests`, `wait`, `cancel` and `retry`, for the queue and its history; and `logs`.

A log is an environment's or a request's, and ends with the reason why that exited.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from ...client import following
from ...client.api import DaemonClient
from ...client.errors import ClientError, NotFound
from ...schema.operation_options import MEMORY_LIMITS
from ...schema.spec import LaunchOptions
from ...schema.states import FINAL_STATES, RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import safe_pieces
from ...system.text.units import plural
from .. import completion, exit_codes, options
from ..following import async_option, follow, leave
from ..output import phrases
from ..output.failures import environment_failure, request_failure
from ..output.output import Output, bad, good, is_coloured, requests_table

DEFAULT_LIMIT = 50
_STATES = click.Choice([state.value for state in RequestState], case_sensitive=False)


@click.command()
@click.option(
    "--state", "states", multiple=True, type=_STATES,
    help="Show only requests in this state; repeatable.",
)  # fmt: skip
@click.option("--operation", metavar="NAME", help="Show only this operation, such as launch.")
@click.option("--environment", metavar="NAME", help="Show only requests for this environment.")
@click.option(
    "--limit", type=options.WholeNumber(1, 1000), default=DEFAULT_LIMIT, show_default=True,
    help="Number of requests to show, newest first.",
)  # fmt: skip
@options.json_option
def requests(output: Output, **filters: Any) -> None:
    """Show the queue and its history, newest first.

    Examples:
      openenv requests --state failed                  # what failed
      openenv requests --environment my_env --limit 5  # its last five
    """
    found = options.connect(output).requests(**filters)
    if output.as_json:
        output.json({"requests": found})
    elif not found:
        output.result("no requests")
    else:
        output.draw(requests_table(found, time.time()))


active_requests_argument = click.argument(
    "request_ids", nargs=-1, required=True, metavar="REQUEST_ID…",
    shell_complete=completion.active_requests,
)  # fmt: skip


@click.command()
@active_requests_argument
@click.option(
    "--timeout", type=options.Duration(0), metavar="DURATION",
    help="Stop waiting after this long, with exit code 124; the requests continue.",
)  # fmt: skip
@options.json_option
def wait(request_ids: tuple[str, ...], timeout: float | None, output: Output) -> int:
    """Wait until requests have ended. The exit code is that of the worst outcome.

    Examples:
      openenv wait 7f3a91c2               # its outcome is the exit code
      openenv wait --timeout 5m 7f3a91c2  # exit code 124 if it has not ended
    """
    client = options.connect(output)
    # All are looked up first: a wrong id is refused now, not after the others have ended.
    found = [client.request(request_id) for request_id in request_ids]
    ended: list[Json] = []
    deadline = time.monotonic() + (math.inf if timeout is None else timeout)
    for request in found:
        left_seconds, find = deadline - time.monotonic(), options.reconnect
        final = following.wait(find, request["id"], seconds=left_seconds)
        if final["state"] not in FINAL_STATES:
            wanted = phrases.duration(timeout or 0.0)
            left = plural(len(found) - len(ended), "request")
            output.note(bad(f"{left} not final within {wanted}; {request['label']} continues"))
            output.json({"requests": ended, "timed_out": True})
            return exit_codes.TIMED_OUT
        _tell(final, output)
        ended.append(final)
    output.json({"request": ended[0]} if len(ended) == 1 else {"requests": ended})
    return exit_codes.of_requests(ended)


@click.command()
@active_requests_argument
@options.json_option
def cancel(request_ids: tuple[str, ...], output: Output) -> None:
    """Cancel pending and running requests at once. A request that has ended does not change.

    Examples:
      openenv cancel 7f3a91c2           # one request
      openenv cancel 7f3a91c2 9b1d0c44  # several
    """
    client = options.connect(output)
    found = [client.request(request_id) for request_id in request_ids]
    answers = [client.cancel(request["id"]) for request in found]
    answer = answers[0] if len(answers) == 1 else {"requests": answers}
    output.answer(answer, *map(phrases.cancellation, answers))


@click.command()
@click.argument("request_id", shell_complete=completion.environments_and_requests)
@options.declared_options(LaunchOptions, only=MEMORY_LIMITS)
@async_option
@options.json_option
def retry(request_id: str, output: Output, is_async: bool, **limits: int | None) -> int:
    """Submit an ended request again, unchanged except for the given memory limits.

    If a launch's environment runs meanwhile, the launch updates it. Waits for the end of the
    request; Ctrl-C detaches, a second one cancels.

    Examples:
      openenv retry 7f3a91c2              # the same again
      openenv retry 7f3a91c2 --memory 2G  # with more memory
    """
    from .launch import follow_launch
    from .rollout import follow_rollout

    client = options.connect(output)
    request = client.retry(request_id, **limits)
    if is_async:
        return leave(request, output)
    if request["operation"] == "launch":
        return follow_launch(client, request, output)
    if request["operation"] == "rollout":
        return follow_rollout(client, request, output)
    return follow(client, request, output, lambda final: ({"result": final.get("result")}, []))


def _tell(request: Json, output: Output) -> None:
    if request["state"] == RequestState.SUCCEEDED:
        ran = phrases.duration(request["finished_at"] - request["created_at"])
        output.result(f"{good('✓')} {request['label']}  SUCCEEDED  in {ran}")
        return
    output.note(*request_failure(request))


def _read_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as exc:
        raise click.BadParameter(f"{text!r} is not a regular expression: {exc}") from None


_REMEMBERED = 16 * 1024  # characters, to know whether a log tail has been seen already


@click.command()
@click.argument(
    "targets", nargs=-1, required=True, metavar="NAME|REQUEST_ID…",
    shell_complete=completion.environments_and_requests,
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Follow the log as it grows.")
@click.option(
    "-n", "--tail", type=options.WholeNumber(0), metavar="N", help="Start with the last N lines."
)
@click.option(
    "--since", type=options.Duration(0), metavar="DURATION",
    help="Start with what was printed in the last 5m or 2h, or at most 10 s earlier.",
)  # fmt: skip
@click.option("--grep", type=_read_pattern, metavar="REGEX", help="Print only lines that match.")
@click.option(
    "--replica", metavar="ID", help="Replica of the environment, instead of the newest one."
)
@options.json_option
def logs(
    targets: tuple[str, ...],
    follow: bool,
    tail: int | None,
    since: float | None,
    grep: re.Pattern[str] | None,
    replica: str | None,
    output: Output,
) -> None:
    """Print the log of a replica or of a request; of several, each line begins with its name.

    With -f, a request's log ends with the request, an environment's when it is down. After an
    update, the log continues with the newest replica of the new generation.

    Examples:
      openenv logs -f my_env                   # follow its youngest replica
      openenv logs --grep WARNING my_env echo  # lines of two that match
      openenv logs --since 5m my_env           # the last five minutes
      openenv logs --tail 100 7f3a91c2         # the end of a request's log
    """
    client = options.connect(output)
    found = [(target, *options.find_target(client, target)) for target in targets]
    asked: Json = {"tail": tail, "since": since, "follow": follow}

    def show(target: str, environment: Json | None, request: Json | None) -> None:
        name = target if len(targets) > 1 else None
        so_far = "yet" if since is None else f"in the last {phrases.duration(since)}"
        log = _Log(output, name, grep, so_far, is_followed=follow)
        if environment is not None:
            request = _show_environment(client, environment, log, replica, asked)
        if request is not None:
            seen = log.show(client.request_log(request["id"], **asked))
            request = client.request(request["id"])  # as it ended
            if request["state"] == RequestState.FAILED:
                output.note(*request_failure(request, shown=seen)[:-1])  # this is its log
            elif not seen and tail != 0 and grep is None:
                output.note(f"{request['label']} has printed nothing {log.so_far}")

    if follow and len(found) > 1:
        _at_once(show, found)
    else:
        for each in found:
            show(*each)


def _at_once(show: Callable[..., None], found: list[tuple[Any, ...]]) -> None:
    """Show several logs at once until all have ended; raise the first error.

    The threads are daemons, so that Ctrl-C ends the command before the logs end.
    """
    errors: list[ClientError] = []

    def show_one(*one: Any) -> None:
        try:
            show(*one)
        except ClientError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=show_one, args=each, daemon=True) for each in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def _show_environment(
    client: DaemonClient, environment: Json, log: _Log, replica: str | None, asked: Json
) -> Json | None:
    """Print the log of an environment; returns its launch if no replica has a log yet."""
    name, output = environment["name"], log.output

    def say_change(serving: str | None) -> None:
        now = f"replica {serving} serves now; this is its log:"
        output.note(f"{name} is down" if serving is None else now)

    pieces = client.environment_log(name, replica=replica, on_change=say_change, **asked)
    try:
        if not log.show(pieces) and asked["tail"] != 0 and log.pattern is None:
            silent = name if replica is None else f"replica {replica} of {name}"
            output.note(f"{silent} has printed nothing {log.so_far}")
    except NotFound:
        if replica or not environment.get("request_id"):
            raise
        request = client.request(environment["request_id"])
        short = phrases.short_id(request["id"])
        output.note(f"{name} has printed nothing yet; this is its launch, {short}:")
        return request
    output.note(*(line for line in environment_failure(environment) if "  Log: " not in line))
    return None


@dataclass(frozen=True)
class _Log:
    """Prints one log.

    Attributes:
        name: The beginning of each line; None if there is only one log.
        pattern: Lines without a match are left out.
        so_far: The time of which it is, for a log without a line.
    """

    output: Output
    name: str | None
    pattern: re.Pattern[str] | None
    so_far: str
    is_followed: bool

    def show(self, pieces: Iterator[str]) -> list[str]:
        """Print the log as it comes; returns its last lines.

        Of escape sequences only colours are kept, for a terminal; JSON has each character, escaped.
        """
        if self.output.as_json:
            return self._show_json(pieces)
        pieces = safe_pieces(pieces, keeps_colours=is_coloured(sys.stdout))
        if self.name is not None or self.pattern is not None:
            before = "" if self.name is None else f"{self.name} | "
            pieces = (f"{before}{line}\n" for line in self._matching(pieces))
        last = ""
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            last = (last + piece)[-_REMEMBERED:]
        return last.splitlines()

    def _show_json(self, pieces: Iterator[str]) -> list[str]:
        lines = []
        named = {} if self.name is None else {"target": self.name}
        for line in self._matching(pieces):
            lines.append(line)
            if self.is_followed or named:
                self.output.json_line({**named, "line": line})
        if not (self.is_followed or named):
            self.output.json({"lines": lines})
        return lines

    def _matching(self, pieces: Iterator[str]) -> Iterator[str]:
        pattern = self.pattern
        return (line for line in _lines(pieces) if pattern is None or pattern.search(line))


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
    if rest:
        yield rest
