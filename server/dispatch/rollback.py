# SPDX-License-Identifier: Apache-2.0
"""Which earlier generation an environment is rolled back to. Pure.

The launch of that generation is submitted again: its payload, with the token and the variables, is
in the launch's request, which is kept for as long as the generation can be rolled back to; and what
it ran, in its result: the new launch runs that, or refuses (`operations/launch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...requests_db.records import Environment, Generation
from ..errors import Invalid


def rollback_target(
    environment: Environment, generations: Sequence[Generation], to: int | None
) -> Generation:
    """Choose the generation to launch again.

    Args:
        environment: What is to be rolled back.
        generations: Its history, the newest first.
        to: The number of the one that is wanted; None: the last that served before this one.

    Raises:
        Invalid: There is none, it serves already, or it never has.
    """
    name, serving = environment.name, environment.generation
    hint = f"openenv status {name} shows all"
    if to is None:
        earlier = (each for each in generations if each.number < serving and each.served_at)
        found = next(earlier, None)
        if found is None:
            raise Invalid(f"{name} has no earlier generation that served", hint)
        return found
    found = next((each for each in generations if each.number == to), None)
    if found is None:
        raise Invalid(f"{name} has no generation {to} in its history", hint, field="to")
    if to == serving and environment.state.is_live:
        raise Invalid(f"generation {to} of {name} serves already", hint, field="to")
    if found.served_at is None:
        raise Invalid(f"generation {to} of {name} was never ready", hint, field="to")
    return found
