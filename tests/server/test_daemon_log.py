# SPDX-License-Identifier: Apache-2.0
"""The daemon's own log as JSON lines, of a real daemon."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from openenvd.client import daemon, following
from openenvd.schema.settings import Paths

from .conftest import WAIT_SECONDS

Json = dict[str, Any]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """The log of a daemon that launched `echo`, failed to launch another, and stopped."""
    paths = Paths(tmp_path_factory.mktemp("json") / "home")
    client = daemon.connect(paths, settings={"port": 0, "log_format": "json"})
    following.run(client, "launch", {"source": "echo", "name": "trial", "shards": 1})
    lost = {"source": "json:Lost", "cwd": str(paths.home), "name": "lost"}
    following.wait(client, client.submit("launch", lost)["id"])
    following.run(client, "down", {"name": "trial"})
    daemon.stop(paths)
    return [json.loads(line) for line in paths.daemon_log.read_text().splitlines()]


def test_each_line_is_an_object_with_time_level_logger_and_message(lines: list[Json]) -> None:
    for line in lines:
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        assert line["level"] in logging.getLevelNamesMapping()
        assert line["logger"]
        assert line["message"]


def test_there_is_no_error_and_records_of_uvicorn_are_among_them(lines: list[Json]) -> None:
    assert [line["message"] for line in lines if line["level"] in ("ERROR", "CRITICAL")] == []
    [one] = [line for line in lines if line["message"].startswith("Finished server process")]
    assert one["logger"] == "uvicorn.error"
    assert "color_message" not in one


def test_the_lines_of_a_launch_carry_its_request_and_environment(lines: list[Json]) -> None:
    of_trial = [line for line in lines if line.get("environment") == "trial"]
    start, end = [line for line in of_trial if line.get("operation") == "launch"]
    assert start["request_id"] == end["request_id"]
    assert len(start["request_id"]) == 16
    assert start["worker"].startswith("long-")
    assert start["pid"] > 0
    assert end["message"].endswith("(launch trial) succeeded")
    assert "READY" in {line.get("state") for line in of_trial if "replica" in line}
    assert "environment trial is STOPPED" in {line["message"] for line in of_trial}


def test_a_failed_request_is_logged_with_its_error(lines: list[Json]) -> None:
    [failed] = [line for line in lines if "(launch lost) failed" in line["message"]]
    assert failed["environment"] == "lost"
    assert "module json has no class Lost" in failed["message"]


def test_a_traceback_and_a_warning_are_one_line_each(tmp_path: Path) -> None:
    script = (
        "import logging, sys, warnings\n"
        "from openenvd.server.__main__ import set_up_log\n"
        "from openenvd.schema.settings import Paths, Settings\n"
        "set_up_log(Paths.from_environment(), Settings(log_format='json'), in_background=False)\n"
        "try:\n    raise ValueError('a defect')\n"
        "except ValueError:\n    logging.getLogger('x').exception('it failed', extra={'pid': 7})\n"
        "warnings.warn('old')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OPENENV_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    failed, warned = [json.loads(line) for line in done.stderr.splitlines()]
    assert (failed["message"], failed["pid"]) == ("it failed", 7)
    assert "ValueError: a defect" in failed["exc_info"]
    assert warned["logger"] == "py.warnings"


def test_text_is_the_default_and_needs_no_json_library() -> None:
    script = (
        "import sys\n"
        "from openenvd.server.__main__ import set_up_log\n"
        "from openenvd.schema.settings import Paths, Settings\n"
        "set_up_log(Paths.from_environment(), Settings(), in_background=False)\n"
        "sys.exit('pythonjsonlogger' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=WAIT_SECONDS).returncode == 0
