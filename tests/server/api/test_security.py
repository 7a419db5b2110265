# SPDX-License-Identifier: Apache-2.0
"""Who may call the daemon: tokens, links that work once, sessions of cookie and key."""

import stat
from pathlib import Path

import pytest

from openenvd.server.api import security
from openenvd.server.errors import ApiError, Forbidden, Unauthorized

TOKEN = "a-token"
GOOD = {b"host": b"127.0.0.1:8585", b"authorization": b"Bearer a-token"}


def refusal(headers: dict[bytes, bytes]) -> ApiError | None:
    return security.refuse(list(headers.items()), TOKEN)


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
    assert security.refuse(headers[:-1], TOKEN) is None
    assert isinstance(security.refuse(headers, TOKEN), Forbidden)


@pytest.mark.parametrize("before", [None, b"", b"\xff\xfe", b"kept\n"])
def test_the_token_is_made_private_and_survives_a_restart(
    tmp_path: Path, before: bytes | None
) -> None:
    path = tmp_path / "token"
    if before is not None:
        path.write_bytes(before)
        path.chmod(0o644)
    token = security.ensure_token(path)
    assert token.isascii()
    assert (token == "kept") is (before == b"kept\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert security.ensure_token(path) == token


class Clock:
    now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> security.BrowserSessions:
    return security.BrowserSessions(TOKEN, clock)


def begun(sessions: security.BrowserSessions) -> tuple[bytes, bytes]:
    session = sessions.begin(sessions.new_code())
    assert session is not None
    cookie, *attributes = session[0].split("; ")
    # Scripts cannot read it, and other sites do not send it.
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    return cookie.encode(), session[1].encode()


def test_a_session_is_its_cookie_and_key_also_with_the_next_daemon(
    sessions: security.BrowserSessions, clock: Clock
) -> None:
    cookie, key = begun(sessions)
    _, key_of_another = begun(sessions)
    assert sessions.is_valid(cookie, key)
    assert sessions.is_valid(b"theme=dark; " + cookie + b"; other={not a cookie}", key)
    forged = cookie.partition(b"=")[0] + b"=1.2.3"  # as a page on another port may set it
    assert sessions.is_valid(forged + b"; " + cookie + b"; " + forged, key)
    for one, other in ((cookie, b""), (cookie, key_of_another), (b"", key)):
        assert not sessions.is_valid(one, other)
    assert security.BrowserSessions(TOKEN, clock).is_valid(cookie, key)
    assert not security.BrowserSessions("another-token", clock).is_valid(cookie, key)
    clock.now += security.SESSION_SECONDS + 1
    assert not sessions.is_valid(cookie, key)


def test_each_link_works_once_while_new(sessions: security.BrowserSessions, clock: Clock) -> None:
    code = sessions.new_code()
    assert sessions.begin(code) is not None
    assert sessions.begin(code) is None
    code = sessions.new_code()
    assert [sessions.begin(wrong) for wrong in ("", "nonsense", "ö")] == [None] * 3
    clock.now += security.LINK_SECONDS
    assert sessions.begin(code) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_changed_cookie_is_refused(sessions: security.BrowserSessions, place: int) -> None:
    cookie, key = begun(sessions)
    name, _, value = cookie.partition(b"=")
    parts = value.split(b".")
    parts[place] = b"9" + parts[place][1:] if parts[place][:1] != b"9" else b"8" + parts[place][1:]
    assert not sessions.is_valid(name + b"=" + b".".join(parts), key)


@pytest.mark.parametrize("cookie", [b"", b"=", b";;", b"\xff\xfe", b"openenvd-=..", b"a=b"])
def test_whatever_a_cookie_is_it_is_only_refused(
    sessions: security.BrowserSessions, cookie: bytes
) -> None:
    assert not sessions.is_valid(cookie, b"\xff")
    name = sessions.cookie_name.encode()
    assert not sessions.is_valid(name + b"=" + cookie, b"")
