# SPDX-License-Identifier: Apache-2.0
"""Which Slurm is meant: that of this machine's commands, or of a login node. Light.

Also where its jobs report, on a cluster whose nodes see no folder of this machine's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

# Settings (`slurm_ssh`, …), which the daemon passes on as variables.
HOST_VARIABLE = "OPENENV_SLURM_SSH"
PYTHON_VARIABLE = "OPENENV_SLURM_SSH_PYTHON"
REPORT_VARIABLE = "OPENENV_SLURM_REPORT"
NODE_PYTHON_VARIABLE = "OPENENV_SLURM_NODE_PYTHON"
USUAL_PYTHON = "openenvd/bin/python"  # below the home folder there


def slurm_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what leads Slurm's commands to a cluster; empty: /etc/slurm, of this machine.

    Raises:
        EngineFailed: Jobs are to report where they cannot.
    """
    host, report = environ.get(HOST_VARIABLE, ""), environ.get(REPORT_VARIABLE, "")
    if report:
        _check_report(host, report)
    if host:
        python = environ.get(PYTHON_VARIABLE) or USUAL_PYTHON
        return {HOST_VARIABLE: host, PYTHON_VARIABLE: python, REPORT_VARIABLE: ""}
    return {"SLURM_CONF": environ.get("SLURM_CONF", ""), HOST_VARIABLE: "", REPORT_VARIABLE: report}


def report_address(text: str) -> tuple[str, int]:
    """Read the setting `slurm_report`, `HOST[:PORT]`: the host, and the port, 0 if there is none.

    Raises:
        ValueError: It is something else.
    """
    from urllib.parse import urlsplit  # the command line, which imports this, starts without it

    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port or 0
        is_address = parts.netloc == text and "@" not in text
        if is_address and host not in ("", "0.0.0.0", "::"):  # noqa: S104  nobody connects to these
            return host, port
    raise ValueError(f"slurm_report = {text!r} names no address")


def _check_report(host: str, report: str) -> None:
    from ..errors import EngineFailed

    if host:
        raise EngineFailed(
            "jobs report to the machine where Slurm's commands run: slurm_report and slurm_ssh "
            "exclude each other",
            "leave one of them out; or run the daemon on the login node",
        )
    try:
        report_address(report)
    except ValueError as exc:
        raise EngineFailed(
            f"slurm_report is {report!r}, which is no address of this machine as nodes know it",
            "HOST or HOST:PORT, as in 10.0.0.5:7443; [fd00::5]:7443",
        ) from exc
