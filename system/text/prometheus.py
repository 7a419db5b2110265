# SPDX-License-Identifier: Apache-2.0
"""Metrics in Prometheus' text exposition format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, Any], float]  # labels and value


def metric_family(name: str, text: str, samples: Iterable[Sample], kind: str = "gauge") -> str:
    """Render one metric with its help text and all its samples; `kind` is its type."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Write a value with all its digits: a counter of millions counts on by one."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _labels(labels: Mapping[str, Any]) -> str:
    if not labels:
        return ""
    pairs = (f'{key}="{_escape(str(value))}"' for key, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
