# SPDX-License-Identifier: Apache-2.0
"""What shells complete, and `openenv completion`, which prints the script that has them do it.

    the shell ──_OPENENV_COMPLETE──▶ click ──▶ names and ids, from the daemon that runs

No daemon is started for it, and one that does not answer soon has no names. The functions are what
click's `shell_complete` of a parameter takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import exit_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from click.shell_completion import CompletionItem

    from ..client.api import DaemonClient

Json = dict[str, Any]
Names = list[tuple[str, str]]  # each with what a shell shows beside it

REQUESTS = 50
ANSWER_SECONDS = 1.0  # somebody waits at a prompt
SHELLS = ("bash", "zsh", "fish")
# Those of `environments/engines/registry.py`, which a command line does not import.
PROVIDERS = ("local", "docker", "swarm", "slurm", "ray", "kubernetes")
_ACTIVE = ("PENDING", "RUNNING")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print a script that lets a shell complete commands, options, environments and request ids.

    For bash and zsh put `eval "$(openenv completion bash)"` into ~/.bashrc, or with zsh into
    ~/.zshrc; for fish `openenv completion fish | source` into ~/.config/fish/config.fish.
    """
    from click.shell_completion import get_completion_class

    from .main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    for name in ("openenv", "openenvd"):
        made = kind(cli, {}, name, f"_{name.upper()}_COMPLETE")
        click.echo(made.source_template % made.source_vars())
    return exit_codes.OK


def environments(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete the name of an environment."""
    return _items(begun, _names(_environments))


def usable_environments(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete the name of an environment that has not failed."""
    return _items(begun, (each for each in _names(_environments) if each[1] != "failed"))


def providers(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete the name of a provider."""
    return _items(begun, ((name, "") for name in PROVIDERS))


def active_requests(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete the id of a request that has not ended."""
    return _items(begun, _names(_active_requests))


def environments_and_requests(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete either."""
    return _items(begun, _names(_environments, _requests))


def sources(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete what can be launched: a bundled name, or a folder."""
    from click.shell_completion import CompletionItem

    from ..client.sources import bundled_names

    found = _items(begun, ((name, "bundled") for name in sorted(bundled_names())))
    return found or [CompletionItem(begun, type="dir")]


def _items(begun: str, found: Iterable[tuple[str, str]]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(text, help=told) for text, told in found if text.startswith(begun)]


def _names(*questions: Callable[[DaemonClient], Names]) -> Names:
    """Return what the daemon answers; it is asked no more once it has not answered."""
    from ..client import daemon
    from ..client.errors import ClientError
    from ..server.settings import Paths

    found: Names = []
    try:
        paths = Paths.from_environment()
        client = daemon.find(paths, any_version=True, answer_seconds=ANSWER_SECONDS)
        if client is not None:
            for question in questions:
                found += question(client)
    except ClientError:
        pass
    return found


def _environments(client: DaemonClient) -> Names:
    return [(each["name"], each["state"].lower()) for each in client.environments()]


def _requests(client: DaemonClient) -> Names:
    return [_name_of(each) for each in client.requests(limit=REQUESTS)]


def _active_requests(client: DaemonClient) -> Names:
    found = client.requests(limit=REQUESTS)
    return [_name_of(each) for each in found if each["state"] in _ACTIVE]


def _name_of(request: Json) -> tuple[str, str]:
    from .phrases import short_id

    return short_id(request["id"]), f"{request['label']}, {request['state'].lower()}"
