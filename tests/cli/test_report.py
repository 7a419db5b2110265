# SPDX-License-Identifier: Apache-2.0
"""`openenv check --report`: what others are shown has no secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openenvd.cli import report
from openenvd.server.settings import Paths
from openenvd.system.hidden_values import REDACTED


@pytest.mark.parametrize(
    "secret", ["plain sesame", 'se"same', "ses\\ame", "-----KEY-----\nses\name", "sésame öffne"]
)
def test_a_secret_is_hidden_whatever_letters_it_has(tmp_path: Path, secret: str) -> None:
    paths = Paths(tmp_path)
    run_file = paths.runs / "trial" / "0.json"
    run_file.parent.mkdir(parents=True)
    run_file.write_text(json.dumps({"env": {"NAME": secret}}))
    told = f"it said {secret} and ended"
    lines = [json.dumps({"message": told}, ensure_ascii=is_ascii) for is_ascii in (True, False)]
    paths.daemon_log.write_text("\n".join([*lines, told]))
    report.write(tmp_path / "report", paths, None, {"message": told})
    text = (tmp_path / "report").read_text()
    assert text.count(f"it said {REDACTED} and ended") == 4
