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
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ..system.extras import install_command
from ..system.hidden_values import hide_credentials

_DEFAULT = "http://localhost:4318"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
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
