# SPDX-License-Identifier: Apache-2.0
"""`openenv bench`: queue a measurement, show its progress, print where the results are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..client.sources import working_folder
from . import completion
from .following import async_option, follow, leave
from .options import Duration, connect, json_option, seconds
from .output import Output, good

_COUNTS, _DURATIONS = "N,N,…", "DURATION,…"


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.option("--requests-grid", metavar=_COUNTS, help="Sessions at once [32,128,512].")
@click.option("--wait-grid", metavar=_DURATIONS, help="How long a step waits [1].")
@click.option("--reps", type=click.IntRange(1, 100), help="How often each batch is measured [3].")
@click.option("--mode", type=click.Choice(["ws", "http"]), help="WebSocket or HTTP [ws].")
@click.option("--compare", is_flag=True, help="Measure both modes, and compare them.")
@click.option(
    "--action", metavar="JSON", help="Action of each step, for environments without wait_seconds."
)
@click.option(
    "--generators", type=click.IntRange(1, 256), help="Number of load-generator processes."
)
@click.option(
    "--window", type=click.IntRange(min=1), metavar="N",
    help="Handshakes under way at once; by default all of a batch.",
)  # fmt: skip
@click.option(
    "--session-timeout", type=Duration(min=0, min_open=True), metavar="DURATION",
    help="Time limit of a session, beyond its wait [120].",
)  # fmt: skip
@click.option(
    "--output-dir", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results; by default below OPENENV_HOME.",
)  # fmt: skip
@async_option
@json_option
def bench(name: str, as_json: bool, is_async: bool, **options: Any) -> int:
    """Measure how many sessions an environment holds at once, and how long they take.

    Connect, reset, one step that waits, close; all sessions of a batch connect at once, as training
    code does, unless --window bounds the handshakes under way. A handshake may take ten seconds, as
    OpenEnv's client gives it. Counts the connections that the kernel dropped. Writes raw.jsonl,
    summary.csv and five figures. Ctrl-C detaches, a second one cancels.
    """
    output = Output(as_json=as_json)
    payload = _payload(name, options)
    client = connect(output)
    client.environment(name)  # an unknown name is refused at once, with similar names
    request = client.submit("benchmark", payload)
    if is_async:
        return leave(request, output)
    return follow(client, request, output, _conclude)


def _payload(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Only given options are sent."""
    folder = options["output_dir"]
    mode = options["mode"]
    said = {
        "requests_grid": _list("--requests-grid", options["requests_grid"], int, "whole numbers"),
        "wait_grid": _list("--wait-grid", options["wait_grid"], seconds, "durations"),
        "repetitions": options["reps"],
        "modes": ["http", "ws"] if options["compare"] else mode and [mode],
        "action": read_action(options["action"]),
        "generators": options["generators"],
        "window": options["window"],
        "session_timeout_seconds": options["session_timeout"],
        "output_dir": None if folder is None else str(working_folder() / folder),
    }
    return {"name": name, **{key: value for key, value in said.items() if value is not None}}


def _list(
    option: str, text: str | None, kind: Callable[[str], float], what: str
) -> list[Any] | None:
    if text is None:
        return None
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise click.BadParameter(
            f"{text!r} is not a list of {what}; write 1,5,10", param_hint=option
        )
    return values


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
