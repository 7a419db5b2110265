# SPDX-License-Identifier: Apache-2.0
"""A program that answers the dashboard's questions about a folder of rollouts, as JSON.

    dashboard ──GET──▶ daemon ──`python -m openenvd.rollouts.replay QUESTION`──▶ this process
                          ◀───────────────── JSON, or {"error": …} ─────────────────┘

Each question has a process of its own: large observations would block the daemon's interpreter
lock, and stay in its memory. A question is a JSON object: `folder`, and `show`, which is one of
    summary     counts, and the rewards as a histogram and over time
    episodes    rows from `offset` on, at most `limit`, in the order of their ids
    steps       the steps of `episode` from `first` on, with separate images; `next` is null at the
                end

If the folder has no rollouts (yet), or damaged ones, the answer is the error. The daemon ends a
process that needs too much memory or time, and says so.
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

import orjson

from ..system.process.proc import set_oom_score_adj
from ..system.text.json_lines import Json
from ..system.text.units import MB
from .episodes import EpisodeStatus
from .errors import RolloutError
from .folder.readers import EpisodeRow, Rollouts, open_rollouts
from .folder.rows import StepRow
from .images import Image, Place, image_of_numbers, take_images

MAX_MEMORY_BYTES = 1024 * MB
OOM_SCORE_ADJ = 900  # the kernel ends it before anything else of ours
BINS = 24  # of the histogram
SPANS = 60  # of the rewards over time
MAX_STEPS = 50
MAX_BYTES = 4 * MB  # of steps in one answer; the first one may have more
MAX_IMAGE_BYTES = 16 * MB  # of a step; further images are listed without their data
MAX_TEXT_BYTES = 64 << 10  # of an observation, an action or info
SHOWN = (
    *("episode_id", "environment", "seed", "status", "total_reward", "advantage", "filtered"),
    *("steps", "attempts", "started_at", "finished_at"),
    *("failure_reason", "failure_message", "failure_step"),
)


def main() -> int:
    """Answer the question in the first argument."""
    limit_memory()
    try:
        answer = answer_to(json.loads(sys.argv[1]))
    except (RolloutError, OSError) as exc:
        answer = {"error": {"message": str(exc), "hint": getattr(exc, "hint", None)}}
    except MemoryError:
        what = f"reading it needs more than {MAX_MEMORY_BYTES // MB} MB"
        answer = {"error": {"message": what, "hint": "read it with openenvd.rollouts"}}
    sys.stdout.buffer.write(encoded(answer))
    return 0


def limit_memory() -> None:
    """Limit the memory of this process, which the kernel is to end before the daemon."""
    set_oom_score_adj(os.getpid(), OOM_SCORE_ADJ)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def answer_to(question: Json) -> Json:
    """Return the answer as JSON values.

    Raises `RolloutError`: The folder has no rollouts, damaged ones, or no such episode.
    """
    rollouts = open_rollouts(question["folder"])
    if question["show"] == "summary":
        return summary(rollouts)
    if question["show"] == "episodes":
        return episodes(rollouts, question["offset"], question["limit"])
    try:
        episode = rollouts.episode(question["episode"])
    except KeyError:
        message = f"{question['folder']} has no episode {question['episode']}"
        raise RolloutError(message, "failed episodes are left out without --keep-failed") from None
    return steps(episode, question["first"])


def summary(rollouts: Rollouts) -> Json:
    """Return counts, and the rewards of complete episodes, or of truncated ones if none is."""
    statuses: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    by_status: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    steps = odd = 0
    for episode in rollouts:
        row = episode.row
        steps += row["steps"]
        statuses[row["status"]] += 1
        if row["status"] == EpisodeStatus.FAILED:
            failures[row["failure_reason"]] += 1
        elif row["total_reward"] is None:  # one of its rewards was not a number
            odd += 1
        else:
            by_status[row["status"]].append((row["finished_at"], row["total_reward"]))
    shown = EpisodeStatus.DONE if EpisodeStatus.DONE in by_status else EpisodeStatus.TRUNCATED
    rewards = sorted(by_status[shown])
    return {
        "episodes": len(rollouts),
        "steps": steps,
        "statuses": statuses,
        "failures": failures,
        "episodes_with_odd_rewards": odd,
        "rewards_of": shown,
        "histogram": histogram([reward for _, reward in rewards]),
        "over_time": over_time(rewards),
    }


def histogram(values: list[float]) -> Json | None:
    """Return `{"least", "most", "mean", "counts"}`, with the number of values per equal span."""
    if not values:
        return None
    least, most = min(values), max(values)
    count = BINS if most > least else 1
    counts = [0] * count
    for value in values:
        # Halves are subtracted, since the span of the greatest numbers is not finite.
        share = (value / 2 - least / 2) / (most / 2 - least / 2) if most > least else 0.0
        counts[min(count - 1, int(share * count))] += 1
    return {"least": least, "most": most, "mean": _mean(values), "counts": counts}


def _mean(values: list[float]) -> float:
    """Return the mean, even if the sum exceeds the greatest number."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def over_time(rewards: list[tuple[float, float]]) -> list[Json]:
    """Return the least, mean and greatest reward of the episodes that ended in each time span."""
    if not rewards:
        return []
    began, ended = rewards[0][0], rewards[-1][0]
    width = max((ended - began) / SPANS, 1e-9)
    found = []
    for number, of in groupby(rewards, lambda one: min(SPANS - 1, int((one[0] - began) / width))):
        values = [reward for _, reward in of]
        at, mean = began + (number + 0.5) * width, _mean(values)
        extremes = {"least": min(values), "most": max(values)}
        found.append({"at": at, "mean": mean, "episodes": len(values), **extremes})
    return found


def episodes(rollouts: Rollouts, offset: int, limit: int) -> Json:
    """Return rows of episodes, in the order of their ids."""
    ids = rollouts.episode_ids()
    rows = [rollouts.episode(episode_id).row for episode_id in ids[offset : offset + limit]]
    return {"total": len(ids), "offset": offset, "episodes": [episode_view(row) for row in rows]}


def episode_view(row: Any) -> Json:
    """Return the parts of an episode's row that are shown."""
    return {name: row[name] for name in SHOWN}


def steps(episode: EpisodeRow, first: int) -> Json:
    """Return as many steps of an episode as fit into an answer."""
    found: list[Json] = []
    size_bytes = 0
    for step in islice(frames(episode, first), MAX_STEPS):
        size_bytes += len(encoded(step))
        if found and size_bytes > MAX_BYTES:
            break
        found.append(step)
    end = first + len(found)
    is_last = bool(found) and found[-1]["is_end"]
    return {"episode": episode_view(episode.row), "steps": found, "next": None if is_last else end}


def frames(episode: EpisodeRow, first: int) -> Iterator[Json]:
    """Yield the steps of an episode from `first` on, and then the final observation."""
    yield from map(_step, islice(episode.steps(), first, None))
    rest, images = take_images(episode.final_observation)
    last = {"observation": text_view(rest), "images": image_views(images)}
    yield {"number": episode.row["steps"], "is_end": True, **last}


def _step(row: StepRow) -> Json:
    rest, images = take_images(row.observation)
    arrays = row.arrays
    for name, array in arrays.items():
        if array.dtype not in ("uint8", "|u1"):
            continue
        if (image := image_of_numbers(memoryview(array.data), array.shape)) is not None:
            images.append(((name,), image))
    return {
        "number": row.number,
        "is_end": False,
        "observation": text_view(rest),
        "images": image_views(images),
        "action": text_view(row.action),
        "info": text_view(row.info),
        "reward": row.reward,
        "done": row.done,
        "arrays": [
            {"name": name, "dtype": array.dtype, "shape": list(array.shape)}
            for name, array in arrays.items()
        ],
    }


def image_views(found: list[tuple[Place, Image]]) -> list[Json]:
    """Return what a page shows of images: place, type, size, and base64 as far as there is room."""
    listed: list[Json] = []
    room_bytes = MAX_IMAGE_BYTES
    for place, image in found:
        fits = len(image.data) <= room_bytes
        room_bytes -= len(image.data) if fits else 0
        named = {"place": ".".join(map(str, place)), "type": image.media_type}
        sides = {"width": image.width, "height": image.height, "bytes": len(image.data)}
        data = base64.b64encode(image.data).decode() if fits else None
        listed.append({**named, **sides, "data": data})
    return listed


def text_view(value: Any) -> Json:
    """Return `{"value"}`, or `{"text", "bytes"}` with the beginning of a large value."""
    text = encoded(value)
    if len(text) <= MAX_TEXT_BYTES:
        return {"value": value}
    return {"text": text[:MAX_TEXT_BYTES].decode(errors="replace"), "bytes": len(text)}


def encoded(value: Any) -> bytes:
    """Return a value as JSON; half a surrogate pair is replaced, and `NaN` is null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # half a pair or a large number, which only the standard library can write
        text = json.dumps(value, ensure_ascii=False)
        finite = json.loads(text, parse_constant=lambda _name: None)  # null, as orjson has it
        return json.dumps(finite, ensure_ascii=False).encode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
