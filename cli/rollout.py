# SPDX-License-Identifier: Apache-2.0
"""`openenv rollout`: queue a rollout, show its progress, print what is in the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..operations.options import RolloutOptions
from ..requests_db.states import RequestState
from ..system.terminal_text import plain
from .following import follow, leave, submit, submit_options
from .options import connect, declared_options, given_options, json_option
from .output import Output, bad, good
from .source import working_folder

CHAT_PREFIX = "openai:"
CHAT_VARIABLES = ("OPENAI_API_KEY", "OPENAI_MODEL")  # handed over when they are set here

KEPT = "  finished episodes are kept: the same command plays the missing ones"
SHOWN_CHARACTERS = 200  # of what a failed episode says


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--out", required=True, metavar="DIR", help="Folder to write the episodes to.")
@declared_options(RolloutOptions)
@submit_options
@json_option
def rollout(names: tuple[str, ...], as_json: bool, is_async: bool, **options: Any) -> int:
    """Run many episodes at environments of this daemon, or at the URLs of any.

    Asked for again, it plays what the folder does not have yet. Ctrl-C detaches, a second one
    cancels; what has finished is kept.
    """
    output = Output(as_json=as_json)
    payload = _payload(names, options)
    client = connect(output)
    for name in names:
        if "://" not in name:  # an unknown name is refused at once, with similar names
            client.environment(name)
    request = submit(client, "rollout", payload, options)
    if is_async:
        return leave(request, output)
    kept = f" in {request['payload'].get('out')}; "  # what we begin our summary with
    return follow(client, request, output, _conclude, is_told_later=lambda line: kept in line)


def _payload(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The operation's payload, with given options only."""
    here = working_folder()
    given = given_options(RolloutOptions, options)
    if given.get("policy", "").startswith(CHAT_PREFIX):
        chat = {name: os.environ[name] for name in CHAT_VARIABLES if name in os.environ}
        given |= {"env": chat | given.get("env", {})} if chat else {}
    more = {"more_names": list(names[1:])} if names[1:] else {}
    out = (here / Path(options["out"]).expanduser()).resolve()
    return {"name": names[0], **more, "out": str(out), "cwd": str(here), **given}


def _conclude(final: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    result = final.get("result")
    if result is not None:
        return {"rollout": result}, _summary(result)
    is_cancelled = final["state"] == RequestState.CANCELLED
    return {"rollout": None}, [KEPT] if is_cancelled else []  # a failure's hint says what to do


def _summary(result: dict[str, Any]) -> list[str]:
    there = result["there"]
    mark = good("✓") if there >= result["wanted"] else bad("!")
    are = "episode is" if result["wanted"] == 1 else "episodes are"
    lines = [f"{mark} {there} of {result['wanted']} {are} in {result['out']}"]
    if result["steps"]:
        lines.append(
            f"  {result['steps']:,} {'step' if result['steps'] == 1 else 'steps'} in "
            f"{result['seconds']:.1f} s "
            f"({result['steps_per_second']:,.0f} steps/s)"
        )
    if result["mean_reward"] is not None:
        lines.append(f"  mean reward {result['mean_reward']:.4g}")
    if result["filtered"]:
        lines.append(f"  {sum(result['filtered'].values())} dropped: {_counts(result['filtered'])}")
    lines += _failures(result)
    if there < result["wanted"]:
        lines.append("  the same command plays the missing ones")
    lag = result["lag"]
    worst = lag["worst_seconds"] * 1000
    lines.append(f"  loop lag p99 {lag['p99_seconds'] * 1000:.1f} ms, worst {worst:.1f} ms")
    return lines


def _failures(result: dict[str, Any]) -> list[str]:
    """How many failed, and of what most often; what became of them."""
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
