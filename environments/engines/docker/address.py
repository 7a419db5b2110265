# SPDX-License-Identifier: Apache-2.0
"""Where Docker is, as the `docker` command finds it, and what mends its complaints.

Without Docker's library.

    DOCKER_HOST ▶ DOCKER_CONTEXT ▶ the current context of ~/.docker/config.json ▶ its usual socket

The first of them that is set counts. A context is read from the files that `docker context create`
writes: `contexts/meta/<sha256 of its name>/meta.json`, and its certificates in `contexts/tls`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....schema.errors import EngineFailed

USUAL_SOCKET = "unix:///var/run/docker.sock"
_HOST, _VERIFY, _CERTIFICATES = "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"
_DEFAULT_CONTEXT = "default"
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


def docker_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead Docker's library to the engine that `docker` would use.

    Those that are not set are empty, which means the same to the library.

    Raises:
        EngineFailed: The context that is named does not exist.
    """
    folder = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME") or "~", ".docker"))
    folder = folder.expanduser()
    if not environ.get(_HOST):
        context = environ.get("DOCKER_CONTEXT") or _current_context(folder)
        if context != _DEFAULT_CONTEXT:
            return _of_context(folder, context)
    return {
        _HOST: environ.get(_HOST) or USUAL_SOCKET,
        _VERIFY: environ.get(_VERIFY, ""),
        _CERTIFICATES: environ.get(_CERTIFICATES, ""),
    }


def _current_context(folder: Path) -> str:
    try:
        found = json.loads((folder / "config.json").read_bytes())
        return str(found.get("currentContext") or _DEFAULT_CONTEXT)
    except (OSError, ValueError, AttributeError):
        return _DEFAULT_CONTEXT


def _of_context(folder: Path, name: str) -> dict[str, str]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    try:
        meta = json.loads((folder / "contexts" / "meta" / digest / "meta.json").read_bytes())
        endpoint: dict[str, Any] = meta["Endpoints"]["docker"]
        host = str(endpoint["Host"])
    except (OSError, ValueError, LookupError, TypeError) as exc:
        message = f"Docker has no context {name!r} that can be read"
        raise EngineFailed(message, "docker context ls; docker context use default") from exc
    certificates = folder / "contexts" / "tls" / digest / "docker"
    if not certificates.is_dir():
        return {_HOST: host, _VERIFY: "", _CERTIFICATES: ""}
    verify = "" if endpoint.get("SkipTLSVerify") else "1"
    return {_HOST: host, _VERIFY: verify, _CERTIFICATES: str(certificates)}


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
