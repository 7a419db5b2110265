# SPDX-License-Identifier: Apache-2.0
"""`openenv rollout`: queue a rollout, show how far it is, say what is in the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..requests_db.states import RequestState
from .options import connect, json_option, megabytes
from .output import Output, bad, good
from .queued import follow, leave
from .source import read_variables, working_folder

CHAT_PREFIX = "openai:"
CHAT_VARIABLES = ("OPENAI_API_KEY", "OPENAI_MODEL")  # handed over when they are set here

KEPT = "  what has finished is kept: the same command again plays what is missing"
SHOWN_CHARACTERS = 200  # of what a failed episode says

_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--out", required=True, metavar="DIR", help="Where the episodes are written.")
@click.option("--episodes", type=click.IntRange(min=1), help="How many [256].")
@click.option("--concurrency", type=click.IntRange(min=1), help="How many at once [64].")
@click.option("--policy", metavar="POLICY", help="module:function, openai:URL, or random [random].")
@click.option("--async", "is_async", is_flag=True, help="Print the request's id, and return.")
@click.option("--max-steps", type=click.IntRange(min=1), help="Most steps of an episode [100].")
@click.option("--step-timeout", type=_SECONDS, metavar="SECONDS", help="Longest step [60].")
@click.option(
    "--policy-timeout", type=_SECONDS, metavar="SECONDS", help="Longest call of the policy."
)
@click.option("--episode-timeout", type=_SECONDS, metavar="SECONDS", help="Longest episode.")
@click.option(
    "--retries", type=click.IntRange(min=0), help="Further attempts at an episode that fails [2]."
)
@click.option("--seed", type=int, help="Of the first episode; each further one, or group, adds 1.")
@click.option(
    "--group", type=click.IntRange(min=2), metavar="N",
    help="N episodes begin alike, and are compared with each other.",
)  # fmt: skip
@click.option(
    "--advantages", metavar="HOW",
    help="group-normalised (the default with --group), leave-one-out, centred, module:function.",
)  # fmt: skip
@click.option(
    "--filter", "filters", multiple=True, metavar="FILTER",
    help="Keep min-steps=N, max-steps=N, min-reward=R, max-reward=R; drop failed, zero-advantage, "
    "or what module:function says. Repeatable.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["jsonl", "parquet", "arrow"]), help="Of the files."
)
@click.option("--keep-failed", is_flag=True, help="Write episodes that failed, too.")
@click.option(
    "--keep-cached", is_flag=True,
    help="Leave large files in the page cache, to be read at once.",
)  # fmt: skip
@click.option(
    "--buffer", type=megabytes, metavar="SIZE",
    help="Most memory between sessions and disk [256M].",
)  # fmt: skip
@click.option(
    "--max-loop-lag", type=_SECONDS, metavar="SECONDS",
    help="Fail when the event loop was held for longer.",
)  # fmt: skip
@click.option(
    "-e", "--env", "variables", multiple=True, metavar="KEY[=VALUE]",
    help="A variable for the policy; without a value, the one it has here. Repeatable.",
)  # fmt: skip
@click.option("--memory", type=megabytes, metavar="SIZE", help="Most memory of the rollout.")
@click.option("--timeout", type=_SECONDS, metavar="SECONDS", help="Longest it may run altogether.")
@click.option("--retry-oom", is_flag=True, help="Killed for memory, go on with what it needed.")
@click.option("--priority", type=click.IntRange(-100, 100), help="Higher runs earlier.")
@click.option("--idempotency-key", metavar="KEY", help="The same key again is the same request.")
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
        if "://" not in name:  # one that does not exist is told at once, with what is near
            client.environment(name)
    request = client.submit(
        "rollout",
        payload,
        idempotency_key=options["idempotency_key"],
        priority=options["priority"],
        timeout_seconds=options["timeout"],
        retry_oom=options["retry_oom"] or None,
    )
    if is_async:
        return leave(request, output)
    kept = f" in {request['payload'].get('out')}; "  # what we begin our summary with
    return follow(client, request, output, _conclude, is_told_later=lambda line: kept in line)


def _payload(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What the operation is given. Only what was said is sent."""
    here = working_folder()
    policy = options["policy"] or ""
    chat = [name for name in CHAT_VARIABLES if name in os.environ]
    variables = [*(chat if policy.startswith(CHAT_PREFIX) else ()), *options["variables"]]
    said = {
        "more_names": list(names[1:]) or None,
        "policy": options["policy"],
        "env": read_variables(tuple(variables), os.environ) or None,
        "episodes": options["episodes"],
        "concurrency": options["concurrency"],
        "max_steps": options["max_steps"],
        "step_timeout_seconds": options["step_timeout"],
        "policy_timeout_seconds": options["policy_timeout"],
        "episode_timeout_seconds": options["episode_timeout"],
        "retries": options["retries"],
        "seed": options["seed"],
        "group": options["group"],
        "advantages": options["advantages"],
        "filters": list(options["filters"]) or None,
        "format": options["form"],
        "keep_failed": options["keep_failed"] or None,
        "keep_cached": options["keep_cached"] or None,
        "buffer_mb": options["buffer"],
        "memory_mb": options["memory"],
        "max_loop_lag_seconds": options["max_loop_lag"],
    }
    given = {key: value for key, value in said.items() if value is not None}
    out = (here / Path(options["out"]).expanduser()).resolve()
    return {"name": names[0], "out": str(out), "cwd": str(here), **given}


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
        lines.append("  the same command again plays what is missing")
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
    said = " ".join(result["last_failures"].get(most, "").split())
    shown = said if len(said) <= SHOWN_CHARACTERS else said[:SHOWN_CHARACTERS] + "…"
    lines = [f"  {sum(counts.values())} failed: {_counts(counts)}"]
    if shown:
        lines.append(f"    {_words(most)}: {shown}")
    if result["kept_failed"]:
        return lines
    if left_out := result["left_out"]:
        lines.append(f"  {left_out} that went well are left out with their groups")
    return [*lines, "  failed ones are left out; --keep-failed writes them, as far as they came"]


def _counts(counts: dict[str, int]) -> str:
    """`7 step timed out, 2 policy error`: the most frequent first."""
    ordered = sorted(counts.items(), key=lambda one: -one[1])
    return ", ".join(f"{count} {_words(what)}" for what, count in ordered)


def _words(reason: str) -> str:
    return reason if ":" in reason else reason.replace("_", " ")
