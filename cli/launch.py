# SPDX-License-Identifier: Apache-2.0
"""`openenv launch`: queue a launch, follow it until it is ready, print how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..environments.spec import LaunchOptions
from .following import follow, leave, submit, submit_options
from .options import connect, declared_options, given_options, json_option
from .output import Output, good
from .source import check_name, read_source, working_folder

if TYPE_CHECKING:
    from ..client.api import DaemonClient


@click.command()
@click.argument("source")
@click.option(
    "--name", metavar="NAME", help="Name of the environment; by default made from its source."
)
@declared_options(LaunchOptions)
@submit_options
@json_option
def launch(source: str, as_json: bool, is_async: bool, **options: Any) -> int:
    """Run an environment: a bundled name, a folder with openenv.yaml, or module:Class.

    Waits until it is ready, and prints its address. Ctrl-C detaches, a second one cancels.
    """
    output = Output(as_json=as_json)
    payload, note = _payload(source, options)
    if note is not None:
        output.note(note)
    client = connect(output)
    request = submit(client, "launch", payload, options)
    if is_async:
        return leave(request, output)
    ready = f"{request['environment']} is ready at "  # what we end with ourselves

    def conclude(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return _conclude(final, client, output)

    return follow(
        client, request, output, conclude, is_told_later=lambda line: line.startswith(ready)
    )


def _payload(text: str, options: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What the operation is given, and a note for the user. Only what was said is sent."""
    here = working_folder()
    source = read_source(text, here)
    name = source.name if options["name"] is None else check_name(options["name"])
    given = given_options(LaunchOptions, options)
    if given.get("token", "").startswith("@"):
        given["token"] = _read_token(given["token"][1:])
    return {"name": name, "source": source.text, "cwd": str(here), **given}, source.note


def _read_token(path: str) -> str:
    """Read a token from a file, as which no other user sees it in `ps`.

    Raises:
        click.BadParameter: The file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as exc:
        raise click.BadParameter(f"{path}: {exc}", param_hint="--token") from None


def _conclude(
    final: dict[str, Any], client: DaemonClient, output: Output
) -> tuple[dict[str, Any], list[str]]:
    environment = _environment_of(final)
    if environment["address"] is None:
        return {"environment": environment}, []
    launched = final["result"]["environment"]
    if launched.get("has_token"):
        environment["base_url"] = client.base_url(environment["name"])["base_url"]
    if launched.get("is_exposed"):
        output.note(
            f"warning: {environment['name']} can be reached from other machines, by whoever has "
            "its token"
        )
    base_url = environment.get("base_url") or environment["address"]
    return {"environment": environment}, [
        f"{good('✓')} {environment['name']} is ready at {environment['address']}",
        "",
        "  from openenv import GenericEnvClient",
        f'  with GenericEnvClient(base_url="{base_url}").sync() as env:',
        "      print(env.reset().observation)",
    ]


def _environment_of(request: dict[str, Any]) -> dict[str, Any]:
    """The environment as the launch left it: name, state, address and, when ready, replicas."""
    found = (request.get("result") or {}).get("environment")
    if found is not None:
        return {"name": found["name"], "state": found["state"], "address": found["address"]}
    return {"name": request["environment"], "state": request["state"], "address": None}
