# SPDX-License-Identifier: Apache-2.0
"""What Docker complains about, and the command that mends it; of its library and of its command."""

from __future__ import annotations

INSTALL = "install Docker: apt install docker.io, or https://docs.docker.com/engine/install"
_NEEDS_BUILDKIT = "requires BuildKit"
# What it says, in lower case, and the command that mends it.
_MENDED_BY = {
    "permission denied": "let this user use it: sudo usermod -aG docker $USER, and log in again",
    "cannot connect": "start it: sudo systemctl start docker, or open Docker Desktop",
    "error during connect": "look at DOCKER_HOST, or at docker context ls",
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
    return next((hint for words, hint in _MENDED_BY.items() if words in lowered), None)
