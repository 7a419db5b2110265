# SPDX-License-Identifier: Apache-2.0
"""Which Slurm is meant: that of this machine's commands, or of a login node. Light."""

from __future__ import annotations

from collections.abc import Mapping

# The settings `slurm_ssh` and `slurm_ssh_python`, which the daemon passes on as variables.
HOST_VARIABLE = "OPENENV_SLURM_SSH"
PYTHON_VARIABLE = "OPENENV_SLURM_SSH_PYTHON"
USUAL_PYTHON = "openenvd/bin/python"  # below the home folder there


def slurm_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what leads Slurm's commands to a cluster; empty: /etc/slurm, of this machine."""
    host = environ.get(HOST_VARIABLE, "")
    if not host:
        return {"SLURM_CONF": environ.get("SLURM_CONF", ""), HOST_VARIABLE: ""}
    return {HOST_VARIABLE: host, PYTHON_VARIABLE: environ.get(PYTHON_VARIABLE) or USUAL_PYTHON}
