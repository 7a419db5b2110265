# SPDX-License-Identifier: Apache-2.0
"""`openenv rollout`: queue a rollout, show its progress, print what is in the folder."""

from __future__ import annotations

import shlex
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...client import sources
from ...client.errors import NotFound
from ...schema.operation_options import RequestOptions, RolloutOptions
from ...schema.spec import REPOSITORY_SCHEMES
from ...schema.states import EnvironmentState, RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from ...system.text.units import plural
from .. import completion, exit_codes, following
from ..following import follow, follow_request, leave, submit, submit_options
from ..help_pages import grouped, set_option
from ..options import connect, declared_options, given_options, json_option
from ..output.output import Output, bad, good
from .launch import launch_by_default

if TYPE_CHECKING:
    from ...client.api import DaemonClient

KEPT = "  finished episodes are kept: the same command plays the missing ones"
_BEING_LAUNCHED = (EnvironmentState.PENDING, EnvironmentState.STARTING)
SHOWN_CHARACTERS = 200  # of what a failed episode says


GROUPS = {
    "Episodes": "--out --episodes --concurrency --max-steps --policy | --seed --env --env-file",
    "Groups of episodes": "--group | --tree --advantages --filter",
    "Limits": "| --step-timeout --retries --keep-failed --memory",
    "Command": "--launch --async --json --help | --retry-oom --yes --set",
}
RARE = ("policy_timeout_seconds", "episode_timeout_seconds", "buffer_mb", *following.RARE)


@click.command(cls=grouped(GROUPS))
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...",
    shell_complete=completion.usable_environments,
)  # fmt: skip
@click.option("--out", metavar="DIR", help="Folder to write the episodes to; required.")
@click.option("--launch", "launches", is_flag=True, help="Launch what does not run yet first.")
@declared_options(RolloutOptions, without=RARE)
@set_option(RolloutOptions, RequestOptions, only=RARE)
@submit_options
@json_option
def rollout(
    names: tuple[str, ...], launches: bool, output: Output, is_async: bool, **options: Any
) -> int:
    """Run many episodes at environments of this daemon, or at the URLs of any.

    The same command plays the episodes that the folder does not have yet. Ctrl-C detaches, a second
    one cancels; finished episodes are kept.

    `openenv rollout show DIR` prints the summary of a folder, `rollout show DIR EPISODE` an
    episode.

    Examples:
      openenv rollout echo --out episodes --episodes 64  # random actions
      openenv rollout my_env --out out --policy my_policies:act  # your own
      openenv rollout show episodes  # counts and rewards of a folder
      openenv rollout my_env --out out --launch --group 8  # groups for GRPO
    """
    if options["out"] is None:
        if names[0] == "show":
            from .rollout_show import show

            return show(names[1:], output)
        raise click.MissingParameter(param_type="option", param_hint="'--out'")
    given = given_options(RolloutOptions, options)
    payload = sources.rollout_payload([*map(_name_of, names)], options["out"], given)
    client = connect(output)
    for name in names:
        if "://" in name and not name.startswith(REPOSITORY_SCHEMES):
            continue
        launch_of_it = _launch_to_wait_for(client, name, output, launches=launches)
        if launch_of_it is not None and (launches or not is_async):
            code = _wait_for(client, launch_of_it, output)
            if code != exit_codes.OK:
                return code
    request = submit(client, "rollout", payload, options)
    return leave(request, output) if is_async else follow_rollout(client, request, output)


def follow_rollout(client: DaemonClient, request: Json, output: Output) -> int:
    """Follow a rollout that was submitted, and print what is in its folder."""
    kept = f" in {request['payload'].get('out')}; "  # the summary begins with this
    return follow(client, request, output, _conclude, is_shown_later=lambda line: kept in line)


def _launch_to_wait_for(
    client: DaemonClient, text: str, output: Output, *, launches: bool
) -> Json | None:
    """Return the launch of an environment that is not ready; None when it runs.

    Raises:
        NotFound: It does not run and `--launch` was not given, or no environment has this name.
    """
    name = _name_of(text)
    try:
        environment = client.environment(name)
    except NotFound:
        if (source := _source_of(text)) is None:
            raise
    else:
        if environment["state"] in _BEING_LAUNCHED:
            return client.request(environment["request_id"])
        if environment["state"] not in (EnvironmentState.FAILED, EnvironmentState.STOPPED):
            return None
        source = environment.get("source") or name
    if launches:
        return launch_by_default(client, name, source, output)
    own_name = sources.read_source(source, sources.working_folder()).name
    called = "" if own_name == name else f" --name {name}"
    hint = f"openenv launch {shlex.quote(source)}{called} first, or add --launch"
    details = {"kind": "not_found", "message": f"{name} is not running", "hint": hint}
    raise NotFound(HTTPStatus.NOT_FOUND, details)


def _wait_for(client: DaemonClient, launch: Json, output: Output) -> int:
    """Show a launch's log until it has ended; returns the exit code."""
    try:
        final = follow_request(client, launch, output)
    except KeyboardInterrupt as exc:
        return following.detach(client, launch, output, exc)
    code = exit_codes.of_request(final)
    if code != exit_codes.OK:
        output.json({"request_id": final["id"], "error": final.get("error")})
    return code


def _name_of(text: str) -> str:
    """Return the environment's name; a source stands for the environment launched from it."""
    is_path = "://" not in text and (text in {".", ".."} or "/" in text)
    is_source = is_path or text.startswith(REPOSITORY_SCHEMES)
    return sources.read_source(text, sources.working_folder()).name if is_source else text


def _source_of(text: str) -> str | None:
    """Return the text if it names what can be launched: a bundled name, repository or folder."""
    if text in sources.bundled_names() or text.startswith(REPOSITORY_SCHEMES):
        return text
    try:
        manifest = Path(text).expanduser() / sources.MANIFEST
        is_project = (sources.working_folder() / manifest).is_file()
    except (OSError, RuntimeError):  # too long, unreadable, or `~` of an unknown user
        is_project = False
    return text if is_project else None


def _conclude(final: Json) -> tuple[Json, list[str]]:
    result = final.get("result")
    if result is not None:
        return {"rollout": result}, _summary(result)
    is_cancelled = final["state"] == RequestState.CANCELLED
    return {"rollout": None}, [KEPT] if is_cancelled else []  # a failure's hint says what to do


def _summary(result: Json) -> list[str]:
    there = result["there"]
    mark = good("✓") if there >= result["wanted"] else bad("!")
    are = "is" if result["wanted"] == 1 else "are"
    wanted = plural(result["wanted"], result["unit"])
    lines = [f"{mark} {there:,} of {wanted} {are} in {result['out']}"]
    if result["steps"]:
        rate = f"{result['seconds']:.1f} s ({result['steps_per_second']:,.0f} steps/s)"
        of_trees = f"{plural(result['episodes'], 'episode')}, " if result["unit"] == "tree" else ""
        lines.append(f"  {of_trees}{plural(result['steps'], 'step')} in {rate}")
    lines += _rewards(result)
    if result["filtered"]:
        lines.append(f"  {sum(result['filtered'].values())} dropped: {_counts(result['filtered'])}")
    lines += [f"  {line}" for line in result["damaged"]]
    lines += _failures(result)
    if there < result["wanted"]:
        lines.append("  the same command plays the missing ones")
    return lines


def _rewards(result: Json) -> list[str]:
    """Describe the mean rewards of complete and truncated episodes, and invalid rewards."""
    lines = []
    if result["mean_reward"] is not None:
        lines.append(f"  mean reward {result['mean_reward']:.4g}")
    if count := result["truncated"]:
        mean = result["truncated_mean_reward"]
        reward_note = "" if mean is None else f"; their mean reward {mean:.4g}"
        steps = plural(result["max_steps"], "step")
        lines.append(f"  {count} truncated at {steps}{reward_note}")
    if odd := result["odd_rewards"]:
        with_odd = f"{plural(result['episodes_with_odd_rewards'], 'episode')} with rewards"
        lines.append(f"  {with_odd} that are no numbers, left out of the mean: {_counts(odd)}")
    return lines


def _failures(result: Json) -> list[str]:
    """Return how many episodes failed, the most frequent reason, and whether they are kept."""
    counts = result["failures"]
    if not counts:
        return []
    most = max(counts, key=counts.__getitem__)
    said = " ".join(plain(result["last_failures"].get(most, "")).split())
    shown = said if len(said) <= SHOWN_CHARACTERS else said[:SHOWN_CHARACTERS] + "…"
    lines = [f"  {sum(counts.values())} failed: {_counts(counts)}"]
    if shown:
        lines.append(f"    {_words(most)}: {shown}")
    if result["kept_failed"]:
        return lines
    if left_out := result["left_out"]:
        lines.append(f"  {left_out} successful ones are left out with their groups")
    return [*lines, "  failed ones are left out; --keep-failed writes them up to the failure"]


def _counts(counts: dict[str, int]) -> str:
    """`7 step timed out, 2 policy error`: the most frequent first."""
    ordered = sorted(counts.items(), key=lambda one: -one[1])
    return ", ".join(f"{count} {_words(what)}" for what, count in ordered)


def _words(reason: str) -> str:
    return reason if ":" in reason else reason.replace("_", " ")
