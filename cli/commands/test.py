# SPDX-License-Identifier: Apache-2.0
"""`openenv test`: launch an environment for a test alone, find its faults, take it down.

    launch ─▶ test ─▶ report ─▶ down      whatever happens: a check fails, Ctrl-C, a signal

It has a name of its own and one shard, so that all its sessions are in one process, and what that
holds is theirs.
"""

from __future__ import annotations

import secrets
from typing import Any

import click

from ...client.api import DaemonClient
from ...client.sources import check_source, read_source, working_folder
from ...schema.operation_options import EnvironmentTestOptions
from ...schema.spec import LaunchOptions
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from ...system.text.terminal_text import plain
from .. import completion, exit_codes
from ..following import follow_request, submit
from ..option_groups import set_option
from ..options import connect, declared_options, given_options, json_option
from ..output.output import Output, bad, faint, good
from .bench import read_action
from .check import ended_by_signals, take_down

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
    what mends it. The exit code is 1 if a check fails.
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
            client, request, output, is_told_later=lambda _: operation == "test", detaches=False
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
                faint(f"    mend:  {plain(finding['remedy'])}"),
            ]
    failed = sum(each["outcome"] == "failed" for each in report["checks"])
    if failed:
        return [*lines, "", bad(f"{failed} of {len(report['checks'])} checks failed")]
    return [*lines, "", good("passed")]
