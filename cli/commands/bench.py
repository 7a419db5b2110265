# SPDX-License-Identifier: Apache-2.0
"""`openenv bench` measures how many sessions an environment holds at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...client.sources import resolve_path
from ...schema.operation_options import BenchmarkOptions
from ...system.text.json_lines import Json
from ...system.text.units import plural
from .. import completion
from ..following import async_option, carry_out
from ..options import connect, declared_options, given_options, json_option, read_action, seconds
from ..output.output import Output, good


def numbers(read: Callable[[str], float], what: str) -> Callable[[str], list[float]]:
    """Return a function that reads numbers separated by commas, such as `32,128,512`."""

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

    Each session connects, resets, takes one step that waits, and closes. All sessions of a batch
    connect at once, as training code does, unless --window limits the handshakes under way. A
    handshake may take ten seconds, the limit of OpenEnv's client. Counts connections that the
    kernel dropped. Writes raw.jsonl, summary.csv, summary.json. Ctrl-C detaches, a second cancels.

    Examples:
      # 32, 128 and 512 sessions at once, three times
      openenv bench benchmark
      # other batches, an action of its own
      openenv bench my_env --requests-grid 64,1024 --action '{"message": "hi"}'
      # with steps that wait one, five and ten seconds
      openenv bench benchmark --wait-grid 1,5,10
    """
    folder = options["output_dir"]
    said = {
        "name": name,
        "requests_grid": options["requests_grid"],
        "wait_grid": options["wait_grid"],
        "action": read_action(options["action"]),
        "output_dir": None if folder is None else str(resolve_path(folder)),
        **given_options(BenchmarkOptions, options),
    }
    client = connect(output)
    client.environment(name)  # an unknown name is refused at once, with similar names
    payload = {key: value for key, value in said.items() if value is not None}
    return carry_out(client, "benchmark", payload, output, _conclude, is_async=is_async)


def _conclude(final: Json) -> tuple[Json, list[str]]:
    if not (result := final.get("result")):
        return {"result": result}, []
    least, most = (plural(result["tried"][at], "session") for at in (0, -1))
    words = {result["tried"][-1]: f"at least {most} (the most that was tried)"}
    words[0] = f"fewer than {least} (95 % of them have to succeed)"
    largest = (
        words.get(each["sessions"], plural(each["sessions"], "session"))
        + (f" (wait {wait:g} s)" if wait else "")
        for each in result["max_batch"]
        for wait in [each["wait_seconds"]]
    )
    mark = good("✓") if all(each["sessions"] for each in result["max_batch"]) else "!"
    return {"result": result}, [
        f"{mark} {result['name']} holds {', '.join(largest)}",
        "",
        *(f"  {path}" for path in result["files"]),
    ]
