# SPDX-License-Identifier: Apache-2.0
"""What is said of a Slurm command that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenvd.environments.engines.base import EngineGone
from openenvd.environments.engines.slurm import commands as slurm_commands

UNCONFIGURED = """\
sinfo: error: fetch_config: DNS SRV lookup failed
sinfo: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    ("file", "how"),
    [("", "without SLURM_CONF"), ("/etc/one.conf", "with SLURM_CONF=/etc/one.conf")],
)
def test_without_a_configuration_the_hint_names_the_variables_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, how: str
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat >&2 <<END\n{UNCONFIGURED}END\nexit 1\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", file)
    with pytest.raises(EngineGone) as raised:
        slurm_commands.run(str(sinfo))
    hint = str(raised.value.hint)
    assert hint.startswith(f"the daemon was started {how}: openenv stop, export SLURM_CONF=")
    assert hint.endswith("openenv up")
