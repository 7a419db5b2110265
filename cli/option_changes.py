# SPDX-License-Identifier: Apache-2.0
"""How the options of an update differ from those of what it updates, in one line.

A launch states all options; those that it leaves out have their defaults. Values of variables,
tokens and options of engines are never shown.
"""

from __future__ import annotations

from typing import Any

from ..environments.spec import LaunchOptions
from ..system.options import Option, options_of

Json = dict[str, Any]

_IS_SET = ("no", "yes")


def option_changes(before: Json, now: Json) -> list[str]:
    """Return the changes in words: `max-sessions 64 to the default`, `MODEL removed`."""
    changes: list[str] = []
    for item in options_of(LaunchOptions):
        old, new = (spec.get(item.name, item.default) for spec in (before, now))
        if old != new:
            changes += _change(item, old, new)
    return changes


def drops_options(before: Json, now: Json) -> bool:
    """Whether the update leaves out what was stated before: an option, a variable, a package."""
    for item in options_of(LaunchOptions):
        old, new = (spec.get(item.name, item.default) for spec in (before, now))
        if item.kind in (dict, list):
            if set(_named(item, old)) - set(_named(item, new)):
                return True
        elif old != new and new == item.default:
            return True
    return False


def _change(item: Option, old: Any, new: Any) -> list[str]:
    name = _flag(item)
    if item.kind in (dict, list):
        prefix = "" if item.kind is dict else f"{name} "
        was, is_now = _named(item, old), _named(item, new)
        return [
            *(f"{prefix}{key} removed" for key in was if key not in is_now),
            *(f"{prefix}{key} added" for key in is_now if key not in was),
            *(f"{prefix}{key} changed" for key in was if key in is_now and was[key] != is_now[key]),
        ]
    if item.name == "token":
        return [f"{name} {'removed' if new is None else 'added' if old is None else 'changed'}"]
    if item.kind is bool and item.default is False:
        return [f"{name} {'added' if new else 'removed'}"]
    return [f"{name} {_shown(item, old)} to {_shown(item, new)}"]


def _named(item: Option, values: Any) -> dict[str, Any]:
    """The values of a repeatable option by what may be shown of each."""
    if item.kind is dict:
        return dict(values or {})
    if item.name == "engine_options":
        return {name: value for name, _, value in (text.partition("=") for text in values or ())}
    return dict.fromkeys(values or ())


def _flag(item: Option) -> str:
    word = item.name.removesuffix("_seconds").removesuffix("_mb").replace("_", "-")
    return (item.flag or word).removeprefix("--")


def _shown(item: Option, value: Any) -> str:
    if value is None:
        return "the default"
    if isinstance(value, bool):
        text = _IS_SET[value]
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    unit = "M" if item.name.endswith("_mb") else " s" if item.name.endswith("_seconds") else ""
    return f"the default {text}{unit}" if value == item.default else f"{text}{unit}"
