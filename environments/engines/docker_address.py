# SPDX-License-Identifier: Apache-2.0
"""Where Docker is, as the `docker` command finds it; without Docker's library.

    DOCKER_HOST ▶ DOCKER_CONTEXT ▶ the current context of ~/.docker/config.json ▶ its usual socket

The first of them that is set counts. A context is read from the files that `docker context create`
writes: `contexts/meta/<sha256 of its name>/meta.json`, and its certificates in `contexts/tls`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import EngineFailed

USUAL_SOCKET = "unix:///var/run/docker.sock"
_HOST, _VERIFY, _CERTIFICATES = "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"
_DEFAULT_CONTEXT = "default"


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
