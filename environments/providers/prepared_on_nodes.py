# SPDX-License-Identifier: Apache-2.0
"""What is launched, kept for nodes of Slurm that make it ready themselves, without a shared folder.

launch ──files, as tar──▶ home/slurm/archives/DIGEST.tar ──▶ a job's request, with its token
       ──what it is─────▶ the replica's plan ───────────────▶ the same (`slurm_node.py`)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from ...env_host.protocol import HostConfig
from ..engines.slurm_address import NODE_PYTHON_VARIABLE, USUAL_PYTHON
from ..engines.slurm_reporting import archive_path
from ..layout import Layout, make_private
from ..sources.program import Program
from ..sources.resolve import ResolvedSource
from ..spec import EnvironmentSpec
from .prepared_there import pack, what_is


def program_for_nodes(layout: Layout, spec: EnvironmentSpec, source: ResolvedSource) -> Program:
    """Return a program that each node makes ready when its first job begins.

    Raises:
        PreparationFailed: Slurm runs no such thing.
        OSError: Its files cannot be kept.
    """
    what = what_is(source)
    folder = make_private(archive_path(layout, "").parent)
    with tempfile.NamedTemporaryFile(dir=folder) as archive:
        digest, count = pack(source, archive.file)
        if digest is not None and not (path := archive_path(layout, digest)).exists():
            archive.flush()
            os.fsync(archive.fileno())
            with contextlib.suppress(FileExistsError):  # another launch was faster
                os.link(archive.name, path)
    made_of = what | {"spec": asdict(spec), "digest": digest, "files": count}
    made_of["home"] = layout.home_label
    made_of["python"] = os.environ.get(NODE_PYTHON_VARIABLE) or USUAL_PYTHON
    config = HostConfig(name=spec.name)
    return Program(Path(), Path("/"), config, variables={}, source=made_of)
