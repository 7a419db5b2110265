# SPDX-License-Identifier: Apache-2.0
"""The token of an environment in base URLs, queries and headers."""

import re

import pytest

from openenvd.system.net import access


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
    assert access.split_target(target.encode()) == (path.encode(), query.encode())


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
    assert access.without_parameter(query) == (rest, token)


@pytest.mark.parametrize(
    ("header", "token"),
    [(b"Bearer abc", b"abc"), (b"bearer  abc ", b"abc"), (b"Basic abc", None), (b"", None)],
)
def test_a_bearer_header_has_the_token(header: bytes, token: bytes | None) -> None:
    assert access.bearer(header) == token


@pytest.mark.parametrize("sent", [None, b"", b"ab", b"abcd", b"ABC", "äbc".encode()])
def test_only_the_whole_token_is_one(sent: bytes | None) -> None:
    assert not access.is_token(sent, "abc")
    assert access.is_token(b"abc", "abc")


def test_tokens_need_no_escape_in_a_base_url() -> None:
    token = access.new_token()
    assert re.fullmatch(access.TOKEN_PATTERN, token)
    assert access.without_token(access.with_token("http://[::1]:8", token)) == (
        "http://[::1]:8",
        token,
    )
    assert access.without_token("http://h/p?a=1&token=t&b=") == ("http://h/p?a=1&b=", "t")
    assert access.without_token("http://h") == (access.with_token("http://h", None), None)


# Which names and which pages may use a server of this machine


LOOPBACK = "127.0.0.1"
LAB = frozenset({"https://lab.example:8443"})


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost:1", "127.0.0.1", "127.0.0.1:65535"),
        *("127.8.9.10:80", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"),
    ],
)
def test_every_name_of_loopback_is_allowed(host: str) -> None:
    assert access.is_allowed_host(host, LOOPBACK)


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", "evil.example", "evil.example:8000", "localhost.evil.example"),
        *("127.0.0.1.evil.example", "evil.example#localhost", "evil.example/localhost"),
        *("user@localhost", "localhost@evil.example", "localhost:pass@evil.example"),
        *("localhost.", "127.0.0.1.", "a.localhost", "localhost:", "localhost:65536"),
        *("localhost:8000:9", "localhost:-1", "localhost:\uff18", "localhost\n", "localhost,evil"),
        *("0.0.0.0", "127.1", "2130706433", "0x7f.1", "0x7f000001", "127.0.0.01", "0177.0.0.1"),
        *("[::1%lo]", "[::1%25lo]:80", "::1", "[::1", "::1]", "[localhost]", "[::]", "[]"),
        *("192.168.1.5", "lab.example", "localhost" * 100),
    ],
)
def test_any_other_name_is_refused(host: str) -> None:
    assert not access.is_allowed_host(host, LOOPBACK)


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("192.168.1.5:21000", "192.168.1.5"),
        ("[fd00::5]:21000", "fd00::5"),
        ("[FD00:0::5]", "fd00::5"),
        ("my-box:21000", "my-box"),
        ("10.1.2.3:21000", "0.0.0.0"),
        ("[fd00::5]:21000", "::"),
        ("localhost", "0.0.0.0"),
    ],
)
def test_the_address_that_the_server_is_bound_to_is_allowed(host: str, bound: str) -> None:
    assert access.is_allowed_host(host, bound)
    assert not access.is_allowed_host("evil.example", bound)


@pytest.mark.parametrize("host", ["lab.example", "LAB.example:8443", "lab.example:1"])
def test_the_host_of_an_allowed_origin_is_allowed(host: str) -> None:
    assert access.is_allowed_host(host, LOOPBACK, LAB)
    assert not access.is_allowed_host(f"x{host}", LOOPBACK, LAB)


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3000", "https://localhost", "HTTP://LOCALHOST:3000"),
        *("http://127.0.0.1:21000", "http://[::1]:8888", "https://lab.example:8443"),
    ],
)
def test_pages_of_this_machine_and_those_that_are_named_are_allowed(origin: str) -> None:
    assert access.is_allowed_origin(origin, "localhost:21000", LAB)


@pytest.mark.parametrize(
    "origin",
    [
        *("", "null", "NULL", "*", "http://evil.example", "https://evil.example:443"),
        *("http://localhost.evil.example", "http://localhost@evil.example", "localhost"),
        *("http://", "http:/localhost", "file://", "file://localhost", "ftp://localhost"),
        *("chrome-extension://abcdef", "http://localhost/path", "http://localhost:3000 x"),
        *("http://localhost http://evil.example", "https://lab.example", "http://lab.example:8443"),
    ],
)
def test_pages_of_any_other_origin_are_refused(origin: str) -> None:
    assert not access.is_allowed_origin(origin, "localhost:21000", LAB)


def test_the_servers_own_pages_are_allowed_under_its_own_name_alone() -> None:
    assert access.is_allowed_origin("http://192.168.1.5:21000", "192.168.1.5:21000")
    assert not access.is_allowed_origin("http://192.168.1.5:3000", "192.168.1.5:21000")


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://Lab.example/", "https://lab.example"),
        ("https://lab.example:443", "https://lab.example"),
        ("http://lab.example:80", "http://lab.example"),
        ("http://lab.example:443", "http://lab.example:443"),
        ("http://[::1]:80", "http://[::1]"),
        ("vscode-webview://abc", "vscode-webview://abc"),
    ],
)
def test_an_origin_is_read_as_browsers_spell_it(text: str, origin: str) -> None:
    assert access.read_origin(text) == origin


@pytest.mark.parametrize(
    "text", ["*", "null", "lab.example", "https://", "https://a b", "https://*"]
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        access.read_origin(text)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *(("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True)),
        *(("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("my-box", False)),
    ],
)
def test_an_address_that_others_can_reach_is_not_loopback(address: str, expected: bool) -> None:
    assert access.is_loopback(address) is expected
