# SPDX-License-Identifier: Apache-2.0
"""`openenv launch` runs an environment; `openenv image build` builds the image of one.

Both queue a request, follow it, and print how to use what it made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...client.errors import ApiRefused
from ...client.sources import check_source, read_source, working_folder
from ...schema.errors import InvalidName
from ...schema.operation_options import DrainOptions, ImageOptions, RequestOptions
from ...schema.spec import LaunchOptions, validate_name
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from .. import completion, exit_codes, following, passthrough
from ..following import carry_out, follow, leave, submit, submit_options
from ..help_pages import grouped, set_option
from ..options import connect, declared_options, given_options, json_option
from ..output.failures import error_lines
from ..output.output import Output, good
from ..watching import describe_change, files_below, wait_for_change

if TYPE_CHECKING:
    from ...client.api import DaemonClient

GROUPS = {
    "Environment": "--name --env --with --port | --update --env-file --host --token --allow-origin",
    "Sessions": "--max-sessions --isolate | --shards --session-memory --step-timeout",
    "Replicas": "--replicas --gateway --memory --provider | --min --max --idle-timeout --cpus "
    "--gpus --engine-option --sandbox",
    "Command": "--watch --async --json --help | --retry-oom --yes --set",
}
RARE = (
    *("admission_timeout_seconds", "reset_first", "http_session_idle_seconds", "max_message_mb"),
    *("serve_as_is", "scale_down_seconds", "base", "ready_timeout_seconds"),
    *("max_surge", "max_unavailable"),
    *("drain_timeout_seconds", *following.RARE),
)
MAX_OWN_CHANGES = 5  # launches in a row during which a watched folder changes
WITHOUT_SESSIONS = "http"  # reported by a replica whose app has no sessions


@click.command(cls=grouped(GROUPS))
@click.argument("source", shell_complete=completion.sources)
@click.option("--name", metavar="NAME", help="Name, by default made from the source.")
@click.option(
    "--update/--no-update", default=None,
    help="Update a running environment of this name. Default: if its source is the same.",
)  # fmt: skip
@declared_options(LaunchOptions, without=RARE)
@set_option(LaunchOptions, DrainOptions, RequestOptions, only=RARE)
@submit_options
@click.option("--watch", is_flag=True, help="Update it whenever a file of its folder changes.")
@json_option
def launch(source: str, output: Output, is_async: bool, watch: bool, **options: Any) -> int:
    """Run a bundled environment, a folder, a class, an image or a repository.

    Examples:
      openenv launch echo  # a bundled environment
      openenv launch ./my_env --memory 2G  # a folder, with a memory limit
      openenv launch my_module:MyEnvironment -e API_KEY  # a class, with $API_KEY
      openenv launch ./my_env --replicas 4 --gateway  # four at one address
      openenv launch ./my_env --provider docker  # in a container
      openenv launch --async ./my_env  # print the request's id, and return
      openenv launch --watch ./my_env  # update it whenever a file changes
    """
    payload = _payload(source, options, output)
    if watch:
        if is_async or output.as_json or options["update"] is False:
            raise click.UsageError("--watch goes without --async, --json and --no-update")
        return _launch_at_each_change(_watched_folder(payload), payload, options, output)
    client = connect(output, before_start=lambda: check_source(payload))
    request = submit(client, "launch", payload, options)
    return leave(request, output) if is_async else follow_launch(client, request, output)


def _watched_folder(payload: Json) -> Path:
    """Return the folder of the payload's source; raises `click.UsageError` if there is none."""
    source = payload["source"]
    is_class = ":" in source and "://" not in source and not Path(source).is_absolute()
    folder = Path(payload["cwd"] if is_class else source)
    if not (folder.is_absolute() and folder.is_dir()):
        raise click.UsageError("--watch needs a folder, or module:Class in the current one")
    return folder


def _launch_at_each_change(folder: Path, payload: Json, options: Json, output: Output) -> int:
    """Launch, and update whenever a file changes, until Ctrl-C; what fails waits for a change.

    Raises `click.ClickException`: the project itself changes its files at each launch.
    """
    own_changes = 0
    while True:
        known, code = files_below(folder), None
        try:
            client = connect(output, before_start=lambda: check_source(payload))
            request = submit(client, "launch", payload, options)
            if (code := follow_launch(client, request, output)) == exit_codes.INTERRUPTED:
                return exit_codes.INTERRUPTED
        except ApiRefused as exc:
            output.note(*error_lines(exc))
        changed = describe_change(folder, known, files_below(folder))
        own_changes = own_changes + 1 if changed else 0
        if own_changes == MAX_OWN_CHANGES:
            text = f"{changed} changed during each of {own_changes} launches: if the project writes"
            raise click.ClickException(f"{text} it, launch it from another folder")
        continues = f", and {payload['name']} continues" if code == exit_codes.OK else ""
        output.note(f"\nwatching {folder}; Ctrl-C ends this{continues}")
        output.note(f"{describe_change(folder, known, wait_for_change(folder, known))} changed")


def launch_by_default(client: DaemonClient, name: str, source: str, output: Output) -> Json:
    """Queue the launch of a source without any options; returns the request."""
    return client.submit("launch", _payload(source, {"name": name, "update": None}, output))


def follow_launch(client: DaemonClient, request: Json, output: Output) -> int:
    """Follow a launch that was submitted, and print how to use what it launched."""
    ready = f"{request['environment']} is ready at "  # `_conclude` prints this
    serving: int | None = None  # the generation that serves until the update
    if (request.get("payload") or {}).get("replaces"):
        environment = client.environment(request["environment"])
        serving, generations = environment["generation"], environment["generations"]
        [number] = (each["number"] for each in generations if each["request_id"] == request["id"])
        output.note(f"{environment['name']} runs: updating it to generation {number}")

    def conclude(final: Json) -> tuple[Json, list[str]]:
        if serving is not None and final["state"] != RequestState.SUCCEEDED:
            output.note(f"{final['environment']} continues with generation {serving}")
        return _conclude(final, client, output)

    return follow(
        client, request, output, conclude, is_shown_later=lambda line: line.startswith(ready)
    )


def _payload(text: str, options: Json, output: Output) -> Json:
    """Return the payload, with given options only; print a note if the source is ambiguous."""
    here = working_folder()
    source = read_source(text, here)
    try:
        name = source.name if options["name"] is None else validate_name(options["name"])
    except InvalidName as exc:
        raise click.BadParameter(f"{exc}; {exc.hint}", param_hint="--name") from None
    given = given_options(LaunchOptions, options) | given_options(DrainOptions, options)
    if given.get("token", "").startswith("@"):
        path = given["token"][1:]  # `ps` shows other users this path, and not the token
        try:
            given["token"] = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as exc:
            raise click.BadParameter(f"{path}: {exc}", param_hint="--token") from None
    if options["update"] is not None:
        given["update"] = options["update"]
    if source.note is not None:
        output.note(source.note)
    return {"name": name, "source": source.text, "cwd": str(here), **given}


def _conclude(final: Json, client: DaemonClient, output: Output) -> tuple[Json, list[str]]:
    launched = (final.get("result") or {}).get("environment")
    if launched is None:
        unknown = {"name": final["environment"], "state": final["state"], "address": None}
        return {"environment": unknown}, []
    environment = {key: launched[key] for key in ("name", "state", "address")}
    if launched.get("has_token"):
        environment["base_url"] = client.base_url(environment["name"])["base_url"]
    if launched.get("is_exposed"):
        who = "can be reached from other machines, by anyone with its token"
        output.note(f"warning: {environment['name']} {who}")
    base_url = environment.get("base_url") or environment["address"]
    return {"environment": environment}, [
        f"{good('✓')} {environment['name']} is ready at {environment['address']}",
        "",
        *_code_for(environment["name"], base_url, launched["replicas"][0]),
    ]


def _code_for(name: str, base_url: str, replica: Json) -> list[str]:
    """Return lines of Python: with upstream's client, if that is installed here.

    An app without sessions has no client; the lines call it from the shell.
    """
    if replica.get("serving") == WITHOUT_SESSIONS:
        if replica.get("route") is None:
            return [f"  call it at {base_url}: the app does not show its routes"]
        method, path, *bodies = replica["route"].split(" ", 2)
        body = "".join(f" -H 'Content-Type: application/json' -d '{each}'" for each in bodies)
        return [f"  curl -X {method}{body} '{base_url}{path}'"]
    imported, opening = "openenvd import Client", f'Client().environment("{name}").connect()'
    if passthrough.is_installed():
        imported = "openenv import GenericEnvClient"
        opening = f'GenericEnvClient(base_url="{base_url}").sync()'
    use = "      print(env.reset().observation)"
    return [f"  from {imported}", f"  with {opening} as env:", use]


@click.group()
def image() -> None:
    """Build container images of environments, for engines to start replicas from.

    Examples:
      openenv image build ./my_env  # an image for engines
    """


@image.command()
@click.argument("source", shell_complete=completion.sources)
@declared_options(ImageOptions)
@set_option(RequestOptions, only=following.RARE)
@submit_options
@json_option
def build(source: str, output: Output, is_async: bool, **options: Any) -> int:
    """Build the image of a bundled name, a folder or module:Class.

    The image has a Python, the project, its dependencies, and the server of local environments. It
    is built again only when one of its files has changed. Needs the `docker` command.

    Examples:
      openenv image build ./my_env --tag registry.example.org/my_env:1
      openenv image build ./my_env --base python:3.12  # on another image
    """
    here = working_folder()
    found = read_source(source, here)
    if found.note is not None:
        output.note(found.note)
    payload = {"source": found.text, "cwd": str(here), **given_options(ImageOptions, options)}
    client = connect(output, before_start=lambda: check_source(payload))
    return carry_out(
        client, "build_image", payload, output, _print_image, is_async=is_async, options=options
    )


def _print_image(final: Json) -> tuple[Json, list[str]]:
    built = (final.get("result") or {}).get("image")
    if built is None:
        return {"image": None}, []
    return {"image": built}, [f"{good('✓')} {built}", "", f"  openenv launch docker://{built}"]
