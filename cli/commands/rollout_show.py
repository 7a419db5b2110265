# SPDX-License-Identifier: Apache-2.0
"""`openenv rollout show DIR [EPISODE]`: a folder of rollouts on the terminal, or one episode."""

from __future__ import annotations

import json

import click

from ...client.sources import resolve_path
from ...rollouts import replay
from ...rollouts.episodes import episode_id
from ...rollouts.errors import RolloutError
from ...rollouts.folder.readers import open_rollouts
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from ...system.text.units import plural
from .. import exit_codes
from ..output.output import Output, bad, faint

BAR_WIDTH = 40  # characters of the fullest span of a histogram
MAX_CHARACTERS = 160  # of an observation or an action on its line


def show(words: tuple[str, ...], output: Output) -> int:
    """Print the summary of a folder, or the steps of one of its episodes.

    Raises `click.UsageError`: there is no folder, or one word too many.
    """
    if not 1 <= len(words) <= 2:
        raise click.UsageError("write openenv rollout show DIR [EPISODE]")
    folder = resolve_path(words[0])
    try:
        rollouts = open_rollouts(folder)
        if len(words) == 1:
            found = replay.summary(rollouts)
            lines = summary_lines(str(folder), found)
        else:
            number = words[1]
            episode = rollouts.episode(episode_id(int(number)) if number.isdecimal() else number)
            found = {
                "episode": replay.episode_view(episode.row),
                "steps": list(replay.frames(episode, 0)),
            }
            lines = episode_lines(found)
    except (RolloutError, OSError) as exc:
        name = getattr(exc, "filename", None)
        output.note(bad(plain(str(exc) if name is None else f"{name}: {exc.args[1]}")))
        return exit_codes.FAILED
    except KeyError:
        count = plural(len(rollouts), "episode")
        output.note(bad(f"{folder} has no episode {words[1]}; it has {count}"))
        return exit_codes.NOT_FOUND
    output.answer(found, *lines)
    return exit_codes.OK


def summary_lines(folder: str, found: Json) -> list[str]:
    """Return a folder's counts, and the rewards as a histogram."""
    statuses = ", ".join(f"{count} {status}" for status, count in found["statuses"].items())
    episodes = plural(found["episodes"], "episode")
    lines = [f"{plain(folder)}: {episodes}, {plural(found['steps'], 'step')}: {statuses or 'none'}"]
    for reason, count in found["failures"].items():
        lines.append(f"  {count} failed: {reason.replace('_', ' ')}")
    if odd := found["episodes_with_odd_rewards"]:
        lines.append(f"  {odd} with rewards that are no numbers")
    bars = found["histogram"]
    if bars is None:
        return lines
    lines += ["", f"rewards of {found['rewards_of']} episodes, mean {bars['mean']:.4g}"]
    width = bars["most"] / len(bars["counts"]) - bars["least"] / len(bars["counts"])
    for number, count in enumerate(bars["counts"]):
        if not count:  # most spans of rewards that are 0 or 1
            continue
        bar = "█" * -(-BAR_WIDTH * count // max(bars["counts"]))
        lines.append(f"  {bars['least'] + number * width:>10.4g}  {bar:{BAR_WIDTH}}  {count}")
    return lines


def episode_lines(found: Json) -> list[str]:
    """Return an episode step by step: what was observed, done and rewarded."""
    about = found["episode"]
    which = f"episode {about['episode_id']} of {plain(about['environment'])}"
    which += "" if about["seed"] is None else f", seed {about['seed']}"
    steps = plural(about["steps"], "step")
    lines = [f"{which}: {about['status']}, {steps}, total reward {_number(about['total_reward'])}"]
    if about["failure_reason"]:
        lines.append(bad(plain(f"{about['failure_reason']}: {about['failure_message']}")))
    for step in found["steps"]:
        lines.append(f"{step['number']:>5}  {_short(step['observation'])}")
        if not step["is_end"]:
            reward = faint(f"reward {_number(step['reward'])}")
            lines.append(f"       → {_short(step['action'])}  {reward}")
    return lines


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.6g}"


def _short(value: Json) -> str:
    text = value["text"] if "text" in value else json.dumps(value["value"], ensure_ascii=False)
    return plain(text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…")
