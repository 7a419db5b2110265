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


LOOPBACK = [b"127.0.0.1:8585", b"localhost:8585", b"localhost", b"127.0.0.1", b"[::1]:8585"]
REBOUND = [b"evil.example", b"127.0.0.1.evil.example:8585", b"", b"0.0.0.0"]
FOREIGN = [b"https://evil.example", b"null", b"http://localhost.evil"]


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        *((b"host", host, None) for host in LOOPBACK),
        *((b"host", host, Forbidden) for host in REBOUND),
        (b"origin", b"http://127.0.0.1:8585", None),  # our own page
        *((b"origin", origin, Forbidden) for origin in FOREIGN),
        *(
            (b"authorization", sent, Unauthorized)
            for sent in (b"", b"Bearer ", b"Bearer other", b"Basic a-token", b"a-token")
        ),
    ],
)
def test_a_call_passes_by_a_name_of_loopback_from_no_foreign_page_with_the_token(
    name: bytes, value: bytes, refused: type[ApiError] | None
) -> None:
    found = refusal({**GOOD, name: value})
    assert found is None if refused is None else isinstance(found, refused)


@pytest.mark.parametrize(
    "again",
    [(b"host", b"evil.example"), (b"origin", b"null"), (b"authorization", b"Bearer a-token")],
)
def test_a_header_that_came_twice_is_refused(again: tuple[bytes, bytes]) -> None:
    headers = [*GOOD.items(), (b"origin", b"http://localhost"), again]
    assert refuse(headers[:-1], TOKEN) is None
    assert isinstance(refuse(headers, TOKEN), Forbidden)


@pytest.mark.parametrize("before", [None, "", "kept\n"])
def test_the_token_is_made_private_and_survives_a_restart(
    tmp_path: Path, before: str | None
) -> None:
    path = tmp_path / "token"
    if before is not None:
        path.write_text(before)
        path.chmod(0o644)
    token = ensure_token(path)
    assert token == "kept" if before else token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_token(path) == token
