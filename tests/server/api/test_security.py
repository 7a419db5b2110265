# SPDX-License-Identifier: Apache-2.0
"""Who may call the daemon."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from openenvd.server.api.security import ensure_token, refuse
from openenvd.server.errors import ApiError, Forbidden, Unauthorized

TOKEN = "a-token"
GOOD = {b"host": b"127.0.0.1:8585", b"authorization": b"Bearer a-token"}


def refusal(headers: dict[bytes, bytes]) -> ApiError | None:
    return refuse(list(headers.items()), TOKEN)


def test_a_call_with_the_token_passes() -> None:
    assert refusal(GOOD) is None


@pytest.mark.parametrize("host", [b"localhost:8585", b"localhost", b"127.0.0.1", b"[::1]:8585"])
def test_every_name_of_loopback_passes(host: bytes) -> None:
    assert refusal({**GOOD, b"host": host}) is None


@pytest.mark.parametrize("host", [b"evil.example", b"127.0.0.1.evil.example:8585", b"", b"0.0.0.0"])
def test_a_rebound_name_is_refused_even_with_the_token(host: bytes) -> None:
    assert isinstance(refusal({**GOOD, b"host": host}), Forbidden)


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://localhost.evil"])
def test_a_foreign_page_is_refused_even_with_the_token(origin: bytes) -> None:
    assert isinstance(refusal({**GOOD, b"origin": origin}), Forbidden)


@pytest.mark.parametrize(
    "again",
    [(b"host", b"evil.example"), (b"origin", b"null"), (b"authorization", b"Bearer a-token")],
)
def test_a_header_that_came_twice_is_refused(again: tuple[bytes, bytes]) -> None:
    headers = [*GOOD.items(), (b"origin", b"http://localhost"), again]
    assert refuse(headers[:-1], TOKEN) is None
    assert isinstance(refuse(headers, TOKEN), Forbidden)


def test_our_own_page_passes() -> None:
    assert refusal({**GOOD, b"origin": b"http://127.0.0.1:8585"}) is None


@pytest.mark.parametrize("sent", [b"", b"Bearer ", b"Bearer other", b"Basic a-token", b"a-token"])
def test_a_call_without_the_token_is_refused(sent: bytes) -> None:
    assert isinstance(refusal({**GOOD, b"authorization": sent}), Unauthorized)


def test_the_token_is_private_and_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = ensure_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_token(path) == token


def test_a_token_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("kept\n")
    path.chmod(0o644)
    assert ensure_token(path) == "kept"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_token_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("")
    assert ensure_token(path)
