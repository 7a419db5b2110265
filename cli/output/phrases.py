# SPDX-License-Identifier: Apache-2.0
"""Durations, sizes and ids for people."""

from __future__ import annotations

import time
from typing import Any

from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from ...system.text.units import MB

SHOWN_ID_LENGTH = 8  # of 16; the API takes any unambiguous beginning

_SHORT_SECONDS = 0.1  # shorter times are shown in milliseconds
_STEPS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(0.0, seconds)
    for length, unit in _STEPS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{int(seconds)} s"


def size(count: float) -> str:
    """`512 MB`, `3.7 GB`."""
    megabytes = count / MB
    return f"{megabytes:.0f} MB" if megabytes < 1024 else f"{megabytes / 1024:.1f} GB"


def short_id(request_id: str) -> str:
    """Return the beginning of an id, which is enough for people."""
    return request_id[:SHOWN_ID_LENGTH]


def timing(request: Json, now: float) -> str:
    """Return how long a request has waited, runs, or ran."""
    if request["finished_at"] is not None:
        began = request["started_at"] or request["created_at"]
        ran = duration(request["finished_at"] - began)
        return f"in {ran}, {duration(now - request['finished_at'])} ago"
    if request["started_at"] is not None:
        return f"for {duration(now - request['started_at'])}"
    return f"queued {duration(now - request['created_at'])}"


def generation_timing(generation: Json, now: float) -> str:
    """Return how long a generation of an environment has served, and when it ended."""
    served_at, ended_at = generation["served_at"], generation["ended_at"]
    if ended_at is None:
        return f"for {duration(now - (served_at or generation['created_at']))}"
    ended = f"{duration(now - ended_at)} ago"
    return ended if served_at is None else f"for {duration(ended_at - served_at)}, {ended}"


def describe_json(value: Any, indent: str = "  ") -> list[str]:
    """Return JSON as indented `key: value` lines; a key's ending marks sizes and durations."""
    if not isinstance(value, dict):
        return [f"{indent}{value}"]
    lines: list[str] = []
    for key, item in value.items():
        name = _name_of(key)
        if isinstance(item, dict) and item:
            lines += [f"{indent}{name}:", *describe_json(item, indent + "  ")]
        elif isinstance(item, list) and any(isinstance(one, dict) for one in item):
            lines.append(f"{indent}{name}:")
            for one in item:
                given = one.items() if isinstance(one, dict) else ()
                shown = (f"{_name_of(k)} {_scalar(k, v)}" for k, v in given if v not in (None, ""))
                lines.append(f"{indent}  {', '.join(shown) if given else one}")
        else:
            lines.append(f"{indent}{name}: {_scalar(key, item)}")
    return lines


def _name_of(key: str) -> str:
    if not key.isidentifier():  # a user's name, not a field of ours
        return key
    for ending in ("_bytes", "_seconds"):
        key = key.removesuffix(ending)
    return key.replace("_", " ")


def _scalar(key: str, value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return size(value)
    if isinstance(value, int | float) and key.endswith("_seconds"):
        return f"{value * 1000:.1f} ms" if 0 < value < _SHORT_SECONDS else duration(value)
    if isinstance(value, int | float) and key.endswith("_at"):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, list):
        return ", ".join(plain(str(item)) for item in value)
    return plain(str(value))


def cancellation(answer: Json) -> str:
    """Return the outcome of a `cancel`: `launch trial is being cancelled`."""
    request = answer["request"]
    if answer["cancelled"]:
        return f"{request['label']} is cancelled"
    if answer["cancelling"]:
        return f"{request['label']} is being cancelled"
    return f"{request['label']} has already ended: {request['state']}"
