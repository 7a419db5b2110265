# SPDX-License-Identifier: Apache-2.0
"""Options that are declared once: the name, type, default, bounds and help of each.

    @dataclass(frozen=True, kw_only=True)
    class ServeOptions:
        shards: int | None = option(None, "Processes that serve sessions.", least=1)

    ServeOptions ──┬─▶ its instances carry the values
                   ├─▶ flags of a command       (`cli.options.declared_options`)
                   └─▶ fields of a payload      (`operations.base.payload_of`)

The end of a name is its unit: `_seconds`, `_mb` (2**20 bytes).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option; a bound that is None allows any value."""

    name: str  # of the field; the flag and the payload's field derive from it
    kind: type  # `int`, `float`, `str`, `bool`, `list` or `dict`
    annotation: Any  # the whole type, such as `int | None`
    default: Any  # a new one each time for lists and mappings
    help: str  # one sentence, for the command's help page and the API's schema
    least: float | None = None
    most: float | None = None
    above: float | None = None  # must be exceeded
    choices: tuple[str, ...] = ()  # the values that are allowed; empty: any
    auto: bool = False  # whether `auto` spells the default
    metavar: str | None = None  # on the help page; None derives it from the unit
    # Its flag, if that differs from the name; empty: only the API has this option
    own_flag: str | None = None


def option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002  as Click's and pydantic's
    """Declare an option as a dataclass field; the default `dict` or `list` is an empty one."""
    metadata = {"help": help, **more}
    if default in (dict, list):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(declaration: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in the order of its fields."""
    hints = get_type_hints(declaration)
    return tuple(
        Option(
            name=item.name,
            kind=_kind_of(hints[item.name]),
            annotation=hints[item.name],
            default=item.default if item.default_factory is MISSING else item.default_factory(),
            **item.metadata,
        )
        for item in fields(declaration)
        if "help" in item.metadata
    )


def _kind_of(annotation: Any) -> type:
    if NoneType in get_args(annotation):
        [annotation] = [part for part in get_args(annotation) if part is not NoneType]
    found: type = get_origin(annotation) or annotation
    return found
