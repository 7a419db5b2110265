# SPDX-License-Identifier: Apache-2.0
"""`openenv scale` and `restart` change an environment's replicas; `down` and `prune` free them.

`scale` and `restart` end no session. `prune` removes what was installed for environments.
"""

from __future__ import annotations

from typing import Any

import click

from ...client.api import DaemonClient
from ...client.errors import ApiRefused
from ...schema.operation_options import DrainOptions
from ...schema.settings import Paths
from ...schema.states import RequestState
from ...system.files.disk_space import free_reserve
from ...system.text.json_lines import Json
from ...system.text.units import plural
from .. import completion, exit_codes
from ..following import async_option, carry_out, follow_request, run
from ..options import WholeNumber, connect, declared_options, given_options, json_option
from ..output import phrases
from ..output.failures import error_lines
from ..output.output import Output, good


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.argument("replicas", type=WholeNumber(), metavar="N")
@declared_options(DrainOptions)
@async_option
@json_option
def scale(name: str, replicas: int, is_async: bool, output: Output, **options: Any) -> int:
    """Give an environment N replicas, at the same address.

    With fewer replicas than before, the youngest accept no new sessions, and exit after their last.

    Examples:
      openenv scale my_env 4                     # four, at the same address
      openenv scale my_env 1 --drain-timeout 5m  # one; sessions have 5 minutes
    """
    payload = {"name": name, "replicas": replicas, **given_options(DrainOptions, options)}
    return carry_out(connect(output), "scale", payload, output, _scaled, is_async=is_async)


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.option("--replica", type=WholeNumber(0), metavar="N", help="Restart this one alone.")
@declared_options(DrainOptions)
@async_option
@json_option
def restart(name: str, replica: int | None, is_async: bool, output: Output, **options: Any) -> int:
    """Replace an environment's replicas one after another, at the same address.

    A replica drains once its replacement is ready, and exits when its last session has ended.

    Examples:
      openenv restart my_env              # one after another; no session ends
      openenv restart my_env --replica 2  # one alone
    """
    payload = {"name": name} | ({} if replica is None else {"replica": replica})
    payload |= given_options(DrainOptions, options)
    return carry_out(connect(output), "restart", payload, output, _restarted, is_async=is_async)


def _scaled(final: Json) -> tuple[Json, list[str]]:
    result = final.get("result")
    if result is None:
        return {"environment": None}, []
    count = plural(result["replicas"], "replica")
    line = f"{good('✓')} {result['environment']['name']} has {count}"
    draining = len(result["draining"])
    if draining and result.get("sessions") != 0:
        line += f", and {draining} more until {'its' if draining == 1 else 'their'} sessions end"
    return result, [line]


def _restarted(final: Json) -> tuple[Json, list[str]]:
    result = final.get("result")
    if result is None:
        return {"environment": None}, []
    seconds = phrases.duration((final["finished_at"] or 0.0) - (final["started_at"] or 0.0))
    done = plural(len(result["restarted"]), "replica")
    name = result["environment"]["name"]
    return result, [f"{good('✓')} restarted {done} of {name} in {seconds}"]


@click.command()
@click.argument("names", nargs=-1, metavar="NAME…", shell_complete=completion.environments)
@click.option("--all", "everything", is_flag=True, help="Take down all environments.")
@click.option("--strays", is_flag=True, help="Stop replicas that openenv has no record of.")
@async_option
@json_option
def down(
    names: tuple[str, ...], everything: bool, strays: bool, is_async: bool, output: Output
) -> int:
    """Take environments down, and cancel launches that are still under way.

    Examples:
      openenv down my_env  # stop its replicas
      openenv down --all   # of all environments
    """
    if [bool(names), everything, strays].count(True) != 1:
        raise click.UsageError("name environments, or use --all, or --strays")
    free_reserve(Paths.from_environment().home)
    client = connect(output)
    refused: list[ApiRefused] = []
    if strays:
        found = client.status()["strays"]
        if not found:
            output.answer({"stopped": []}, "no strays")
            return exit_codes.OK
        named = [{"provider": stray["provider"], "id": stray["id"]} for stray in found]
        submitted = [client.submit("down_strays", {"strays": named})]
    else:
        wanted = [e["name"] for e in client.environments()] if everything else list(names)
        if not wanted:
            output.result("no environments to take down")
        submitted, refused = _submit(client, wanted, output, ignore_gone=everything)
    worst = max((exit_codes.of_error(error) for error in refused), default=exit_codes.OK)
    errors = {"errors": [error.details for error in refused]} if refused else {}
    if is_async:
        ids = [request["id"] for request in submitted]
        output.answer({"request_ids": ids, **errors}, *ids)
        return worst
    try:
        ended = [_follow(client, request, output) for request in submitted]
    except KeyboardInterrupt:
        labels = ", ".join(request["label"] for request in submitted)
        output.note(f"\nDetached: {labels}: what has not ended continues; see openenv requests")
        raise
    output.json({"requests": ended, **errors})
    return max(worst, exit_codes.of_requests(ended))


@click.command()
@json_option
def prune(output: Output) -> None:
    """Remove virtual environments and images that no environment uses.

    The next launch of such a project installs its dependencies again. Of the images that openenv
    has built, the newest of each environment stays.

    Examples:
      openenv prune  # free the disk space of unused dependencies
    """
    free_reserve(Paths.from_environment().home)
    result = run(connect(output), "prune", {})["result"]
    output.json(result)
    for venv in result["removed"]:
        made_for = venv["project"] or "an unfinished launch"
        output.result(f"removed {phrases.size(venv['freed_bytes'])} of {made_for}")
    for image in result["images"]:
        output.result(f"removed the image {image}")
    if not result["removed"] and not result["images"]:
        output.result("nothing to remove: everything is in use, or was used within the last minute")
    elif result["removed"]:
        output.result(f"freed {phrases.size(result['freed_bytes'])}")


def _submit(
    client: DaemonClient, names: list[str], output: Output, *, ignore_gone: bool
) -> tuple[list[Json], list[ApiRefused]]:
    """Submit a request for each name, even if others are unknown; return requests, refusals."""
    submitted, refused = [], []
    for name in names:
        try:
            submitted.append(client.submit("down", {"name": name}))
        except ApiRefused as exc:
            if ignore_gone and exc.kind == "not_found":
                continue
            refused.append(exc)
            output.note(*error_lines(exc))
    return submitted, refused


def _follow(client: DaemonClient, request: Json, output: Output) -> Json:
    """Show a request's progress without its log, and why it failed; return the final request."""
    final = follow_request(client, request, output, is_shown_later=lambda _: True)
    if final["state"] != RequestState.SUCCEEDED:
        return final
    what = f"{final['environment']} is down"
    if final["operation"] == "down_strays":
        what = f"stopped {plural(len(final['result']['stopped']), 'stray')}"
    output.result(f"{good('✓')} {what}")
    return final
