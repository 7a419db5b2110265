# SPDX-License-Identifier: Apache-2.0
"""`openenv config`: values, where they were given, and what is not in force yet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from openenvd.schema.settings import Settings

from ..client.fake_daemon import FakeDaemon
from .conftest import Command


def test_without_a_daemon_it_is_what_the_next_one_has_and_none_is_started(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path))
    monkeypatch.setenv("OPENENV_KEEP_DAYS", "2.5")
    (tmp_path / "config.toml").write_text("max-log-mb = 7")
    answer = command("config", "--json")
    assert answer.code == 0, answer.err
    settings = answer.json["settings"]
    assert set(settings) == set(asdict(Settings()))
    assert settings["max_log_mb"] == {"value": 7, "from": "config.toml"}
    assert settings["keep_days"] == {"value": 2.5, "from": "OPENENV_KEEP_DAYS"}
    assert settings["max_pending"] == {"value": 100_000, "from": "default"}
    assert answer.json["pid"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_of_a_daemon_it_is_what_is_in_force_and_what_is_not(
    command: Command, fake: FakeDaemon
) -> None:
    fake.write_identity(settings_from={"port": "--port"}, flags={"port": 9000})
    fake.get("/v1/info", {"settings": asdict(Settings(port=9000))})
    fake.paths.config_file.write_text("max-log-mb = 7")
    answer = command("config")
    assert answer.code == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert ["port", "9000", "--port"] in rows
    assert ["max_log_mb", "64", "default"] in rows
    assert "max_log_mb = 7 (config.toml)" in answer.err
    assert "port" not in answer.err


def test_a_port_that_was_picked_is_in_force_and_what_was_removed_is_until_the_next_daemon(
    command: Command, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = {
        "port": "OPENENV_PORT",
        "max_log_mb": "config.toml",
        "keep_days": "OPENENV_KEEP_DAYS",
    }
    fake.write_identity(settings_from=origins)
    fake.get("/v1/info", {"settings": asdict(Settings(port=41234, max_log_mb=7, keep_days=3.0))})
    monkeypatch.setenv("OPENENV_PORT", "0")
    answer = command("config")
    assert answer.code == 0, answer.err
    sentence = "not in force before the daemon is started again: max_log_mb = 64 (default)"
    assert sentence in answer.err.splitlines()
    monkeypatch.setenv("OPENENV_PORT", "9000")
    assert "again: port = 9000 (OPENENV_PORT), max_log_mb" in command("config").err


def test_a_file_that_cannot_be_is_a_wrong_use(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text("prot = 1")
    answer = command("config")
    assert answer.code == 2
    assert "did you mean port?" in answer.err
