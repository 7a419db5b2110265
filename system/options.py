# SPDX-License-Identifier: Apache-2.0
"""Options that are declared once: the name, type, default, bounds and help of each.

    @dataclass(frozen=True, kw_only=True)
    class ServeOptions:
        shards: int | None = option(None, "Processes that serve sessions.", least=1)

    ServeOptions ──┬─▶ its instances carry the values
                   ├─▶ flags of a command       (`cli.options.declared_options`)
                   └─▶ fields of a payload      (`operations.base.payload_of`)

The unit is the end of the name: `_seconds`, `_mb` (2**20 bytes). Standard library alone: the
command line and the env host import this module.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option.

    Attributes:
        name: The field's name; the flag and the payload's field derive from it.
        kind: `int`, `float`, `str`, `bool`, `list` or `dict`.
        annotation: The whole type, such as `int | None`.
        default: The value when nothing was said; a new one each time for lists and mappings.
        help: One sentence for the command's help page and for the API's schema.
        least: The smallest value that is allowed; None: any.
        most: The largest value that is allowed; None: any.
        above: The value that must be exceeded; None: any.
        choices: The values that are allowed; empty: any.
        auto: Whether `auto` spells the default.
        metavar: What the help page shows for the value; None derives it from the unit.
        flag: The flag, where it is not the name; an empty one: only the API has this option.
    """

    name: str
    kind: type
    annotation: Any
    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    auto: bool = False
    metavar: str | None = None
    flag: str | None = None


def option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002  as Click's and pydantic's
    """Declare an option as a dataclass field.

    Args:
        default: The default; the types `dict` and `list` stand for an empty one.
        help: One sentence about it.
        more: Further attributes of `Option`.
    """
    metadata = {"help": help, **more}
    if default in (dict, list):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(declaration: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in the order of its fields."""
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
