# SPDX-License-Identifier: Apache-2.0
"""`openenv bench` measures how many sessions an environment holds; `openenv test` finds its faults.

A test launches an environment of its own:

    launch ─▶ test ─▶ report ─▶ down      whatever happens: a check fails, Ctrl-C, a signal

It has one shard, so that all its sessions are in one process, and what that
holds is theirs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...client.api import DaemonClient
from ...client.sources import check_source, read_source, working_folder
from ...schema.operation_options import BenchmarkOptions, EnvironmentTestOptions
from ...schema.spec import LaunchOptions
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from .. import completion, exit_codes
from ..following import async_option, carry_out, follow_request, submit
from ..help_pages import set_option
from ..options import connect, declared_options, given_options, json_option, seconds
from ..output.output import Output, bad, faint, good
from .check import ended_by_signals, take_down


def numbers(read: Callable[[str], float], what: str) -> Callable[[str], list[float]]:
    """Return what reads several numbers in one word: `32,128,512`."""

    def read_all(text: str) -> list[float]:
        try:
            values = [read(part) for part in text.split(",") if part.strip()]
        except ValueError:
            values = []
        if not values:
            raise click.BadParameter(f"{text!r} is not a list of {what}; write 1,5,10")
        return values

    return read_all


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.option(
    "--requests-grid", type=numbers(int, "whole numbers"), metavar="N,N,…",
    help="Sessions at once [32,128,512].",
)  # fmt: skip
@click.option(
    "--wait-grid", type=numbers(seconds, "durations"), metavar="DURATION,…",
    help="How long a step waits [1].",
)  # fmt: skip
@click.option(
    "--action", metavar="JSON", help="Action of each step, for environments without wait_seconds."
)
@declared_options(BenchmarkOptions)
@click.option(
    "--output-dir", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results; by default below OPENENV_HOME.",
)  # fmt: skip
@async_option
@json_option
def bench(name: str, output: Output, is_async: bool, **options: Any) -> int:
    """Measure how many sessions an environment holds at once, and how long they take.

    Connect, reset, one step that waits, close; all sessions of a batch connect at once, as training
    code does, unless --window bounds the handshakes under way. A handshake may take ten seconds, as
    OpenEnv's client gives it. Counts the connections that the kernel dropped. Writes raw.jsonl,
    summary.csv and two figures. Ctrl-C detaches, a second one cancels.
    """
    folder = options["output_dir"]
    said = {
        "requests_grid": options["requests_grid"],
        "wait_grid": options["wait_grid"],
        "action": read_action(options["action"]),
        "output_dir": None if folder is None else str(working_folder() / folder),
        **given_options(BenchmarkOptions, options),
    }
    client = connect(output)
    client.environment(name)  # an unknown name is refused at once, with similar names
    given = {key: value for key, value in said.items() if value is not None}
    payload = {"name": name, **given}
    return carry_out(client, "benchmark", payload, output, _conclude, is_async=is_async)


def read_action(text: str | None) -> dict[str, Any] | None:
    """Read the value of `--action`.

    Raises:
        click.BadParameter: It is no JSON object.
    """
    if text is None:
        return None
    try:
        action = json.loads(text)
    except ValueError as exc:
        raise click.BadParameter(f"that is not JSON: {exc}", param_hint="--action") from None
    if not isinstance(action, dict):
        raise click.BadParameter("an action is a JSON object: {…}", param_hint="--action")
    return action


def _conclude(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    if not (result := final.get("result")):
        return {"result": result}, []
    largest = (f"{most:,} sessions ({what})" for what, most in result["max_batch"].items())
    return {"result": result}, [
        f"{good('✓')} {result['name']} holds {', '.join(largest)}",
        "",
        *(f"  {path}" for path in [*result["files"], *result["figures"]]),
    ]


OF_LAUNCH = ("env", "with_packages", "memory_mb", "gpus", "isolate")
RARE = ("serve_as_is", "ready_timeout_seconds")  # as `openenv launch` has them
_MARKS = {"passed": good("✓"), "failed": bad("✗"), "warned": "!", "skipped": faint("-")}


@click.command()
@click.argument("source", shell_complete=completion.sources)
@click.option(
    "--action", "actions", multiple=True, metavar="JSON",
    help="An action to play; by default the examples in its schema, or random ones. Repeatable.",
)  # fmt: skip
@declared_options(EnvironmentTestOptions)
@declared_options(LaunchOptions, OF_LAUNCH)
@set_option(LaunchOptions, only=RARE)
@click.option("--keep", is_flag=True, help="Leave the environment running, to look at its log.")
@json_option
def test(source: str, actions: tuple[str, ...], keep: bool, output: Output, **options: Any) -> int:
    """Find the faults of an environment on a real server: a folder, module:Class, or a name.

    Plays as a client what a training run would: OpenEnv's protocol; memory that a session holds;
    steps that block the event loop; the same episode under the same seed; what stays of 1,000
    sessions (memory, descriptors, threads, tasks, processes). Each finding says what it means and
    how to fix it. The exit code is 1 if a check fails.
    """
    chosen = [action for text in actions if (action := read_action(text)) is not None]
    here = working_folder()
    found = read_source(source, here)
    name = f"test-{secrets.token_hex(3)}"
    launch = {
        "source": found.text,
        "cwd": str(here),
        "name": name,
        **given_options(LaunchOptions, options, only=(*OF_LAUNCH, *RARE)),
    }
    if not launch.get("serve_as_is"):
        launch["shards"] = 1
    given = given_options(EnvironmentTestOptions, options)
    payload = {"name": name, "actions": chosen, **given}
    client = connect(output, before_start=lambda: check_source(launch))
    with ended_by_signals():
        try:
            return _test(client, launch, payload, output)
        finally:
            if keep:
                output.note(f"{name} is left running: openenv logs {name}; openenv down {name}")
            else:
                take_down(client, name)


def _test(client: DaemonClient, launch: Json, payload: Json, output: Output) -> int:
    for operation, of_it in (("launch", launch), ("test", payload)):
        final = _run(client, operation, of_it, output)
        if final["state"] != RequestState.SUCCEEDED:
            output.json({"passed": False, "error": final.get("error"), "checks": []})
            return exit_codes.of_request(final)
    report = final["result"]
    output.json({**report, "source": launch["source"]})
    output.result(*_lines(report))
    return exit_codes.OK if report["passed"] else exit_codes.FAILED


def _run(client: DaemonClient, operation: str, payload: Json, output: Output) -> Json:
    """Queue a request, and follow it; it is cancelled with the command."""
    request = submit(client, operation, payload, {})
    try:
        return follow_request(
            client, request, output, is_shown_later=lambda _: operation == "test", detaches=False
        )
    except KeyboardInterrupt:
        client.cancel(request["id"])
        raise


def _lines(report: Json) -> list[str]:
    """The report for people."""
    width = max(len(each["check"]) for each in report["checks"])
    lines = []
    for each in report["checks"]:
        took = faint(f"({each['seconds']:.1f} s)")
        lines.append(
            f"{_MARKS[each['outcome']]} {each['check']:{width}}  {plain(each['summary'])} {took}"
        )
        for finding in each["findings"]:
            lines += [
                f"    {plain(finding['found'])}",
                faint(f"    means: {plain(finding['means'])}"),
                faint(f"    fix:   {plain(finding['remedy'])}"),
            ]
    failed = sum(each["outcome"] == "failed" for each in report["checks"])
    if failed:
        return [*lines, "", bad(f"{failed} of {len(report['checks'])} checks failed")]
    return [*lines, "", good("passed")]
