# SPDX-License-Identifier: Apache-2.0
"""What Docker complains about, and the command that mends it; of its library and of its command."""

from __future__ import annotations

import os

from .docker_address import USUAL_SOCKET

INSTALL = "install Docker: apt install docker.io, or https://docs.docker.com/engine/install"
_NEEDS_BUILDKIT = "requires BuildKit"
_NO_ANSWER = ("cannot connect", "error during connect")
_VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT")  # which say where it is
# What it says, in lower case, and the command that mends it.
_MENDED_BY = {
    "permission denied": "let this user use it: sudo usermod -aG docker $USER, and log in again",
    "no such host": "its registry is not reachable; an image from elsewhere: docker load -i FILE",
    "no space left": "make room: docker system prune",
    "pull access denied": "look at the image's name; docker login, if it is private",
    "manifest unknown": "look at the image's tag",
    "not found: manifest": "look at the image's tag",
    "no command specified": "its image starts no server; make one that does: openenv image build",
    _NEEDS_BUILDKIT.lower(): "install BuildKit's command: apt install docker-buildx-plugin, or "
    "docker-buildx",
}


def hint_on(text: str) -> str | None:
    """Return the command that mends what Docker complains about; None when that is not known."""
    lowered = text.lower()
    if any(words in lowered for words in _NO_ANSWER):
        return f"start it: sudo systemctl start docker, or open Docker Desktop. {_variables()}"
    return next((hint for words, hint in _MENDED_BY.items() if words in lowered), None)


def _variables() -> str:
    """Say which variables the daemon has: it may lack those of the user's shell."""
    known = {name: os.environ.get(name, "") for name in _VARIABLES}
    own = [f"{name}={text}" for name, text in known.items() if text not in ("", USUAL_SOCKET)]
    has = " and ".join(own) if own else f"no {' and no '.join(_VARIABLES)}"
    return (
        f"The daemon has {has}; to give it those of your shell, restart it there "
        "(replicas go on): openenv stop; openenv up"
    )
