# SPDX-License-Identifier: Apache-2.0
"""Where settings are given: flags, variables, a file; and which of them counts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.client import daemon
from openenvd.client.errors import DaemonNotStarted
from openenvd.schema.settings import Given, Paths, Settings, flags_of_killed, given_settings

from .conftest import WAIT_SECONDS


@pytest.fixture
def home(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / "home")
    paths.home.mkdir(mode=0o700)
    return paths


def test_a_flag_counts_before_a_variable_and_that_before_a_file(home: Paths) -> None:
    assert given_settings(home, {}, {}) == {}
    home.config_file.write_text("port = 1\nkeep_requests = 2\nmax_pending = 3\n")
    environ = {"OPENENV_PORT": "4", "OPENENV_KEEP_REQUESTS": "5", "OPENENV_KEEP_DAYS": ""}
    assert given_settings(home, {"port": 6}, environ) == {
        "port": Given(6, "--port"),
        "keep_requests": Given(5, "OPENENV_KEEP_REQUESTS"),
        "max_pending": Given(3, "config.toml"),
    }
    text = 'keep_days = 2\ndurability = "POWER"\ngateway_certificate = "tls/cert.pem"\n'
    home.config_file.write_text(text)
    given = given_settings(home, {}, {})
    settings = Settings(**{name: each.value for name, each in given.items()})
    assert (settings.keep_days, settings.durability) == (2.0, "power")
    assert settings.gateway_certificate == str(home.home / "tls" / "cert.pem")
    # Only the gateway asks for it, and says that there is no such file.
    home.config_file.write_text('gateway_key = "~nosuchuser/k.pem"')
    given = given_settings(home, {}, {})
    assert given["gateway_key"].value == str(home.home / "~nosuchuser" / "k.pem")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prot = 1", "no setting is called 'prot'; did you mean port?"),
        ("port = 70000", "port = 70000: it must be a whole number from 0 to 65535"),
        ("port = true", "port = True: it must be a whole number"),
        ('port = "8585"', "port = '8585': it must be a whole number"),
        ("keep_days = nan", "keep_days = nan: it must be a number from 0"),
        ("log_level = 3", "log_level = 3: it must be one of debug, info"),
        ("gateway_host = 1", "gateway_host = 1: it must be a text"),
        ("port = \n1 =", "line 1"),
        ("max-log-mb = 1", "no setting is called 'max-log-mb'; did you mean max_log_mb"),
        ("[daemon]\nport = 1", "no setting is called 'daemon'"),
    ],
)
def test_what_cannot_be_is_named_with_the_file(home: Paths, text: str, why: str) -> None:
    home.config_file.write_text(text)
    with pytest.raises(ValueError, match=r"config\.toml") as caught:
        given_settings(home, {}, {})
    assert why in str(caught.value)


def test_a_daemon_says_where_its_settings_come_from_and_the_next_one_has_its_flags(
    home: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.config_file.write_text("max_log_mb = 7\nkeep_requests = 8\n")
    monkeypatch.setenv("OPENENV_KEEP_REQUESTS", "9")
    client = daemon.connect(home, settings={"port": 0})
    try:
        settings = client.info()["settings"]
        assert (settings["max_log_mb"], settings["keep_requests"]) == (7, 9)
        assert client.identity["settings_from"] == {
            "port": "--port",
            "max_log_mb": "config.toml",
            "keep_requests": "OPENENV_KEEP_REQUESTS",
        }
        assert flags_of_killed(home) == {"port": 0}
    finally:
        daemon.stop(home)


def test_a_broken_file_keeps_a_daemon_from_starting_and_is_named(home: Paths) -> None:
    home.config_file.write_text("prot = 1")
    with pytest.raises(DaemonNotStarted, match=r"config\.toml: no setting is called 'prot'"):
        daemon.connect(home)


def test_paths_of_variables_are_relative_to_where_the_daemon_is_started(tmp_path: Path) -> None:
    """It works in `/` itself: a home or a certificate was looked for there."""
    script = (
        "import os; from openenvd.server import __main__ as program; "
        "program._check_floor = lambda settings: print(settings.gateway_key, os.getcwd()) or 1 / 0;"
        "program.main(['--port=0'])"
    )
    environ = {**os.environ, "OPENENV_HOME": "home", "OPENENV_GATEWAY_KEY": "key.pem"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environ, cwd=tmp_path, timeout=WAIT_SECONDS, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(tmp_path / "key.pem"), "/"]
