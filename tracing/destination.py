# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's standard variables: whether traces are wanted, and where they are sent.

    OTEL_SDK_DISABLED=true                            off
    OTEL_TRACES_EXPORTER=none                         off
    OTEL_TRACES_EXPORTER=otlp                         on
    OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT=http://…     on, unless the above say no

All others (sampler, headers, time-outs, batches, resource) are the SDK's to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..system.extras import install_command
from ..system.hidden_values import hide_credentials

if TYPE_CHECKING:
    from .sending import Sending

_DEFAULT = "http://localhost:4318"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_HINT = "correct the OTEL_ variables that it is started with"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where traces are to be sent, and why they cannot be, if so."""

    endpoint: str  # without credentials
    problem: str | None = None
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Describe it for `openenv up` and `info`."""
        return {"endpoint": self.endpoint, "problem": self.problem, "hint": self.hint}


def destination(environ: Mapping[str, str]) -> Destination | None:
    """Say where traces are to be sent; None when they are not wanted.

    Where they are, OpenTelemetry's packages are looked for, and those above them imported.
    """
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    exporters = [
        name.strip() for name in given.get(_EXPORTER, "").lower().split(",") if name.strip()
    ]
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporters == ["none"]:
        return None
    if not exporters and _ENDPOINT not in given and _TRACES_ENDPOINT not in given:
        return None
    base = given.get(_ENDPOINT, _DEFAULT).rstrip("/")
    endpoint = hide_credentials(given.get(_TRACES_ENDPOINT, f"{base}/v1/traces"))
    return Destination(endpoint, *_problem(given, exporters))


def start(environ: Mapping[str, str]) -> Sending | Destination | None:
    """Start to send traces as the standard variables say.

    Args:
        environ: Of this process: the SDK reads that itself.

    Returns:
        What sends them, until it is stopped; where they were to be sent, and the problem, where
        they cannot be; None where they are off.
    """
    to = destination(environ)
    if to is None or to.problem is not None:
        return to
    from .sending import Sending

    try:
        return Sending.start(to.endpoint)
    except Exception as exc:  # of the SDK, which takes not every value of its variables
        why = hide_credentials(str(exc).partition("\n")[0])
        return replace(to, problem=f"OpenTelemetry cannot start: {why}", hint=_HINT)


def _problem(given: Mapping[str, str], exporters: list[str]) -> tuple[str | None, str | None]:
    if exporters and "otlp" not in exporters:
        return f"{_EXPORTER}={given[_EXPORTER]}: the only exporter is otlp", f"{_EXPORTER}=otlp"
    for name in _PROTOCOLS:
        if name in given:
            if given[name] != _PROTOCOL:
                text = f"{name}={given[name]}: the only protocol is {_PROTOCOL}"
                return text, f"{name}={_PROTOCOL}, at the collector's port 4318"
            break
    if not all(map(_is_installed, _MODULES)):
        return "OpenTelemetry is not installed", install_command("otel")
    return None, None


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # of a package above it, which is absent or broken
        return False
