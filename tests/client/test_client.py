# SPDX-License-Identifier: Apache-2.0
"""What a client may be made of, and what the package exports."""

from __future__ import annotations

from pathlib import Path

import pytest

import openenvd
from openenvd import AsyncClient, Client
from openenvd.client import errors


@pytest.mark.parametrize("home", ["http://h:1", "localhost:8585", ":8585", "[::1]:80", "h:8/x"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_is_no_home(
    kind: type[Client | AsyncClient], home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"home is a folder, not an address: '") as caught:
        kind(home=home)
    assert home in str(caught.value)
    kind(home=f"./{home.rpartition('/')[2]}", start=False)  # a folder
    monkeypatch.setenv("OPENENV_HOME", home)
    with pytest.raises(ValueError, match="not an address"):
        kind()
    with pytest.raises(TypeError):
        kind("http://h:1")  # type: ignore[call-arg]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["ApiRefused", "ClientError", "DaemonUnreachable", "RequestFailed", "SessionError"]
)
def test_errors_are_exported(name: str) -> None:
    assert getattr(openenvd, name) is getattr(errors, name)
    assert name in dir(openenvd)
