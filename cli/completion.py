# SPDX-License-Identifier: Apache-2.0
"""Completes words in shells; `openenv completion` prints the script that makes shells ask.

    the shell ──_OPENENV_COMPLETE──▶ click ──▶ names and ids, from a running daemon

No daemon is started, and names are left out if the daemon does not answer soon. `providers`,
`sources` and the names at the end are for click's `shell_complete` of a parameter.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from ..client.api import DaemonClient

    Completing = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

Names = list[tuple[str, str]]  # each with its description

REQUESTS = 50
ANSWER_SECONDS = 1.0  # a user waits at a prompt
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that lets a shell complete commands, options, environments and request ids.

    For bash and zsh put `eval "$(openenv completion bash)"` into ~/.bashrc, or with zsh into
    ~/.zshrc; for fish `openenv completion fish | source` into ~/.config/fish/config.fish.

    Examples:
      openenv completion bash  # print the script for ~/.bashrc
      openenv completion fish  # print the script for config.fish
    """
    from click.shell_completion import get_completion_class

    from .main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    for name in ("openenv", "openenvd"):
        made = kind(cli, {}, name, f"_{name.upper()}_COMPLETE")
        click.echo(made.source_template % made.source_vars())


def providers(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete the name of a provider, also of one from another package."""
    from importlib.metadata import entry_points

    names = ("local", *sorted(entry_points(group="openenvd.engines").names))
    return _items(begun, [(name, "") for name in names])


def sources(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete what can be launched: a bundled name, or a folder."""
    from click.shell_completion import CompletionItem

    from ..client.sources import bundled_names

    found = _items(begun, [(name, "bundled") for name in sorted(bundled_names())])
    return found or [CompletionItem(begun, type="dir")]


def _names_of(*questions: Callable[[DaemonClient], Names]) -> Completing:
    """Return a completion of names, which stops when the daemon leaves a question unanswered."""

    def complete(
        _context: click.Context, _parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from ..client import daemon
        from ..client.errors import ClientError
        from ..schema.settings import Paths

        found: Names = []
        with contextlib.suppress(ClientError):
            paths = Paths.from_environment()
            client = daemon.find(paths, any_version=True, answer_seconds=ANSWER_SECONDS)
            if client is not None:
                for question in questions:
                    found += question(client)
        return _items(begun, found)

    return complete


def _items(begun: str, found: Names) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(text, help=about) for text, about in found if text.startswith(begun)]


def _environments(client: DaemonClient) -> Names:
    return [(each["name"], each["state"].lower()) for each in client.environments()]


def _requests(client: DaemonClient, *, states: tuple[str, ...] = ()) -> Names:
    from .output.phrases import short_id

    return [
        (short_id(each["id"]), f"{each['label']}, {each['state'].lower()}")
        for each in client.requests(limit=REQUESTS)
        if not states or each["state"] in states
    ]


environments = _names_of(_environments)
usable_environments = _names_of(
    lambda client: [each for each in _environments(client) if each[1] != "failed"]
)
environments_and_requests = _names_of(_environments, _requests)
active_requests = _names_of(partial(_requests, states=("PENDING", "RUNNING")))
