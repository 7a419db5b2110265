# SPDX-License-Identifier: Apache-2.0
"""The token of an environment in base URLs, queries and headers."""

from __future__ import annotations

import re

import pytest

from openenvd.system.net.access import (
    TOKEN_PATTERN,
    bearer,
    is_token,
    new_token,
    split_target,
    with_token,
    without_parameter,
    without_token,
)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/?token=abc/ws", "/ws", "token=abc"),
        ("?token=abc/ws", "/ws", "token=abc"),
        ("/?token=a-b_c.~/reset", "/reset", "token=a-b_c.~"),
        ("/?x=1&token=abc/web/step", "/web/step", "x=1&token=abc"),
        ("/?token=abc/ws?session_id=7", "/ws", "token=abc&session_id=7"),
        ("/?token=abc/ws&session_id=7", "/ws", "token=abc&session_id=7"),
        ("/?token=abc%2Fws&session_id=7", "/ws", "token=abc&session_id=7"),
        ("/ws?token=abc", "/ws", "token=abc"),
        ("/ws", "/ws", ""),
        ("/?token=abc", "/", "token=abc"),
        ("/?next=/ws", "/", "next=/ws"),
        ("/callback?token=abc/ws", "/callback", "token=abc/ws"),
    ],
)
def test_a_route_behind_the_token_is_put_back(target: str, path: str, query: str) -> None:
    assert split_target(target.encode()) == (path.encode(), query.encode())


@pytest.mark.parametrize(
    ("query", "rest", "token"),
    [
        (b"", b"", None),
        (b"a=1", b"a=1", None),
        (b"token=abc", b"", b"abc"),
        (b"a=1&token=abc&b=2", b"a=1&b=2", b"abc"),
        (b"tokens=abc", b"tokens=abc", None),
        (b"token=abc&token=d", b"", b"abc"),
    ],
)
def test_the_token_is_taken_out_of_a_query(query: bytes, rest: bytes, token: bytes | None) -> None:
    assert without_parameter(query) == (rest, token)


@pytest.mark.parametrize(
    ("header", "token"),
    [(b"Bearer abc", b"abc"), (b"bearer  abc ", b"abc"), (b"Basic abc", None), (b"", None)],
)
def test_a_bearer_header_has_the_token(header: bytes, token: bytes | None) -> None:
    assert bearer(header) == token


@pytest.mark.parametrize("sent", [None, b"", b"ab", b"abcd", b"ABC", "äbc".encode()])
def test_only_the_whole_token_is_one(sent: bytes | None) -> None:
    assert not is_token(sent, "abc")
    assert is_token(b"abc", "abc")


def test_tokens_need_no_escape_in_a_base_url() -> None:
    token = new_token()
    assert re.fullmatch(TOKEN_PATTERN, token)
    assert without_token(with_token("http://[::1]:8", token)) == ("http://[::1]:8", token)
    assert without_token("http://h/p?a=1&token=t&b=") == ("http://h/p?a=1&b=", "t")
    assert without_token("http://h") == (with_token("http://h", None), None)
