# SPDX-License-Identifier: Apache-2.0
"""The metrics page, in Prometheus' text exposition format 0.0.4.

All of it is read off at scrape time; nothing is counted twice. Names begin with `openenvd_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..executor.messages import WorkerStatus
from ..requests_db.records import Json

Sample = tuple[Mapping[str, str], float]


def render_metrics(
    counts: Mapping[str, int], environments: Sequence[Json], workers: Sequence[WorkerStatus]
) -> str:
    """The whole page."""
    replicas = [(env["name"], replica) for env in environments for replica in env["replicas"]]
    families = [
        _family(
            "openenvd_requests",
            "Requests by state.",
            [({"state": state}, count) for state, count in counts.items()],
        ),
        _family(
            "openenvd_environment_info",
            "Environments by state.",
            [({"environment": e["name"], "state": e["state"]}, 1) for e in environments],
        ),
        _family(
            "openenvd_sessions",
            "Sessions open now.",
            [({"environment": e["name"]}, e["sessions"]) for e in environments],
        ),
        _family(
            "openenvd_replica_restarts",
            "Times a replica was started again.",
            [({"environment": name, "replica": r["id"]}, r["restarts"]) for name, r in replicas],
        ),
        _family(
            "openenvd_worker_resident_bytes",
            "Resident memory of a worker.",
            [({"worker": w.name}, w.rss_bytes) for w in workers if w.rss_bytes is not None],
        ),
        _family(
            "openenvd_worker_busy",
            "Whether a worker runs a request.",
            [({"worker": w.name, "schedule": w.schedule}, w.task_id is not None) for w in workers],
        ),
    ]
    return "".join(families)


def _family(name: str, text: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
    lines += [f"{name}{_labels(labels)} {float(value):g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
