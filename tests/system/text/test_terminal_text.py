# SPDX-License-Identifier: Apache-2.0
"""Foreign text on a terminal: which sequences are removed, and that none is put together."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openenvd.system.text import safe_text

HARMFUL = {
    "clear the screen": "\x1b[2J",
    "move the cursor": "\x1b[1;1H",
    "a mode of the terminal": "\x1b[?1049h",
    "keys that are reported otherwise": "\x1b[>4;1m",
    "a title": "\x1b]0;owned\x07",
    "a link": "\x1b]8;;http://evil.example\x1b\\",
    "the clipboard": "\x1b]52;c;ZWNobw==\x1b\\",
    "a device control string": "\x1bP$q m\x1b\\",
    "a reset": "\x1bc",
    "a character set": "\x1b(0",
    "one byte for two": "\x9b2J",
    "a bell and a backspace": "\x07\x08",
    "a lone escape": "\x1b",
}
COLOURS = "\x1b[31mred\x1b[0m \x1b[38;5;9mred\x1b[m"
# Pieces that sequences are made of.
PIECES = st.sampled_from(
    [*HARMFUL.values(), "\x1b[31m", "\x1b", "[", "]", "2J", "m", "1", ";", "\r", "\n"]
)


@pytest.mark.parametrize("sequence", HARMFUL.values(), ids=HARMFUL)
def test_a_sequence_is_removed_and_the_text_around_it_stays(sequence: str) -> None:
    assert safe_text.plain(f"before{sequence}") == "before"
    assert safe_text.coloured(f"before{sequence}") == "before"
    if sequence != "\x1b":  # which takes the next character with it
        assert safe_text.plain(f"before {sequence}after\tand\n") == "before after\tand\n"


def test_colours_stay_where_they_are_wanted_a_return_ends_a_line_and_no_end_hides_all() -> None:
    assert safe_text.plain(COLOURS) == "red red"
    assert safe_text.coloured(COLOURS) == COLOURS
    assert safe_text.plain("one\r\ntwo\rthree") == "one\ntwo\nthree"
    assert safe_text.plain("\x1b]0;title and\nmore") == "0;title and\nmore"
    stream = safe_text.safe_pieces(["\x1b]" + "x" * 1000] * 20, keeps_colours=True)
    assert "x" * 1000 in "".join(islice(stream, 20))  # before the end is known


@given(st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join))
def test_nothing_that_is_left_is_a_sequence(text: str) -> None:
    assert "\x1b" not in safe_text.plain(text)
    assert safe_text.plain(safe_text.coloured(text)) == safe_text.plain(safe_text.plain(text))
    rest = safe_text.coloured(text)
    for part in rest.split("\x1b")[1:]:
        digits, is_colour, _ = part.removeprefix("[").partition("m")
        assert is_colour
        assert set(digits) <= set("0123456789;:")


@given(st.lists(PIECES | st.text(max_size=5), max_size=12), st.booleans())
def test_pieces_are_shown_as_the_whole_would_be(pieces: list[str], keeps_colours: bool) -> None:
    shown = "".join(safe_text.safe_pieces(pieces, keeps_colours=keeps_colours))
    assert shown == (safe_text.coloured if keeps_colours else safe_text.plain)("".join(pieces))


@pytest.mark.parametrize("opener", ["\x9d", "\x90", "\x1b]"])
@pytest.mark.parametrize("end", ["", "\x00"])
def test_a_text_of_beginnings_is_read_once(opener: str, end: str) -> None:
    """Not once for each beginning, for which pytest would not wait."""
    text = opener * 100_000 + end
    streamed = "".join(safe_text.safe_pieces([text], keeps_colours=True))
    assert "\x1b" not in safe_text.plain(text) + safe_text.coloured(text) + streamed


# Passwords and tokens in URLs are hidden, whatever the name of the variable.


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://u:p@h/x", "http://***@h/x"),
        ("http://u:a@b:c@h", "http://***@h"),
        ("http://u:p:q@h and http://v:w@i", "http://***@h and http://***@i"),
        ("in http://u:p@h://a:b", "in http://***@h://a:b"),
        (f"http://u:{'p' * 5000}@h", "http://***@h"),
        ("http://0123456789abcdef@h", "http://***@h"),
        ("http://git@h/a:b", "http://git@h/a:b"),
        ("http://h/?a=b&api_key=c", "http://h/?a=b&api_key=***"),
        ("openai:http://me:hush@h/v1", "openai:http://***@h/v1"),
        ("openai:https://h/v1?api_key=hush&n=1", "openai:https://h/v1?api_key=***&n=1"),
        ("git+https://ghp_0123456789abcdef@h/r", "git+https://***@h/r"),
        ("https://me:hu@sh/x@h/r", "https://***@h/r"),
        ("git+ssh://git@h:22/r@main", "git+ssh://git@h:22/r@main"),
        ("module:function", "module:function"),
    ],
)
def test_passwords_and_tokens_are_hidden(value: str, shown: str) -> None:
    assert safe_text.hide_credentials(value) == shown


@pytest.mark.parametrize("begin", ["", "http://u:p@"])
@pytest.mark.parametrize("piece", ["://a:", "://", "a:", "://" + "a" * 20, "?", "?token"])
def test_an_address_of_beginnings_is_read_once(begin: str, piece: str) -> None:
    """Not once for each beginning, for which pytest would not wait."""
    text = begin + "://" + piece * 100_000
    assert safe_text.hide_credentials(text) == text.replace("u:p@", "***@")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("TOKEN=abc123 x", "TOKEN=*** x"),
        ('{"api_key": "ab cd", "has_token": true, "port": 80}',
         '{"api_key": "***", "has_token": true, "port": 80}'),
        ("openenv launch x --token s3cr3tvalue", "openenv launch x --token ***"),
        ("sent Bearer abcdefghijkl", "sent Bearer ***"),
        ("key hf_abcdefghijk in use", "key *** in use"),
        ("http://me:pw@host/x?token=abc&y=1", "http://***@host/x?token=***&y=1"),
        ("PASSWORD='a b' memory=5", "PASSWORD='***' memory=5"),
        ("nothing to see at port 8585", "nothing to see at port 8585"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_hidden_in_a_text(text: str, shown: str) -> None:
    assert safe_text.hide_secrets(text) == shown


def test_known_values_are_hidden_wherever_they_stand_and_long_ones_read_once() -> None:
    found = {"a": ["planted", 1, {"b": "x planted-more true 80 y"}]}
    hidden = safe_text.hide_values(found, ["planted", "planted-more", "true", "80", "y"])
    assert hidden == {"a": ["***", 1, {"b": "x *** true 80 y"}]}
    assert not safe_text.is_secret("SETTING", "a-" * 200_000)
    assert not safe_text.is_secret("SETTING", "a1/" * 200_000)
    assert not safe_text.is_secret("SETTING", "https://a/hook" * 50_000)
    text = 'a="' * 100_000
    assert safe_text.hide_secrets(text) == text


RANDOM = "q7Zk2Lw9Xc4Vb8Nm3Ht6Rj1Pf5"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "plain") for name in [
            "BEARER", "OPENAIKEY", "MYAPIKEY", "AZURE_SAS", "SLACK_WEBHOOK", "KEY2", "sas",
            "AWS_ACCESS_KEY_ID", "HF_TOKEN", "SIGNATURE", "DB_PASS", "AUTH", "API_KEY", "KEYS",
            "OTP", "CREDS", "PIN", "SEED_PHRASE", "MNEMONIC", "MY_PW", "HMAC", "NETRC",
            "PASSCODE", "TOTP", "MFA_SEED", "RECOVERY_CODES", "ACCESS_CODE", "DBCREDS", "GHPAT",
            "STORAGESAS", "PSWD", "DB_PSW", "ROOTPW", "WIFI_PSK", "MY_TKN", "KEYSTORE", "LOGIN",
            "apiKeyProd", "APIKEYPROD", "SIGNING", "LICENSE", "client_secret", "DB_PASSWORD",
            "PGPASSWORD", "MYSQL_PWD", "OPENAI_API_KEY", "OPENAI_APIKEY", "SSH_KEY", "SENTRY_DSN",
            "SESSION_COOKIE", "BASIC_AUTH", "PASS", "SMTPPASS", "SSH_PASSPHRASE", "GITHUB_PAT",
            "PAT", "JWT", "MY_JWT_1", "AZURE_STORAGE_CONNECTION_STRING", "ConnectionString",
            "CSRF", "SESSIONID",
        ]),
        *(("SETTING", value) for value in [
            RANDOM, "0123456789abcdef0123456789abcdef", "sk-abcdefgh1234", "Bearer abcdefghijkl",
            "eyJhbGciOiJIUzI1.eyJz.abc", "-----BEGIN RSA PRIVATE KEY-----\nMII", "https://u:p@h/x",
            "https://hooks.slack.com/services/T0/B0/x", "https://discord.com/api/webhooks/1/x",
            "A=h;Password=p;", "SG.abcdefgh.ijklmnop", "ya29.abcdefgh", "dckr_pat_abcdefgh",
            "rk_live_abcdefgh", "whsec_abcdefgh", "nvapi-abcdefgh", "xai-abcdefgh",
            "https://a.blob.core.windows.net/c?sv=1&sig=abc%3D", "110201543:AAHdqTcvCH1vGWJxfSeofS",
            "123456789:AAH-DEF1234ghIkl-zyx57W2v1u123ew11a",
            "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "-----BEGIN PGP PRIVATE KEY BLOCK-----",
            "https://c.webhook.office.com/webhookb2/a@b/c", "https://hooks.zapier.com/catch/1/a",
            "https://chat.example.com/hooks/abc", "gsk_abcdefgh", "dop_v1_abcdefgh",
            "postgres://me:hush@db/x", "https://x:hush@example.com",
            "https://s.example.com/o?X-Goog-Signature=abc", "figd_abcdefgh",
        ]),
    ],
)  # fmt: skip
def test_a_variable_is_hidden_for_its_name_or_for_the_form_of_its_value(
    name: str, value: str
) -> None:
    assert safe_text.is_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "plain") for name in [
            "MAX_TOKENS", "max_new_tokens", "TOKENIZERS_PARALLELISM", "TOKENIZER", "SSH_AUTH_SOCK",
            "GIT_AUTHOR_NAME", "PUBLIC_KEY", "SORT_KEY", "MONKEY", "KEYBOARD", "BYPASS", "COMPASS",
            "SASH", "PATH", "SIGNAL", "DESIGN", "PINNED", "HOOKS", "SPIN", "COMPAT", "ARKANSAS",
            "SACRED", "SPAT", "PATTERN", "TOKEN_LIMIT", "CODE", "MODEL", "PASSENGERS",
        ]),
        ("MONKEY", ""),
        ("URL", "http://me@example.com:80/x"),
        ("GIT_SHA", "0123456789abcdef0123456789abcdef01234567"),
        ("IMAGE", "sha256:" + "0a" * 32),
        ("RUN_ID", RANDOM),
        ("MODEL", "Qwen2.5-7B-Instruct-GPTQ-Int4"),
        ("WHERE", "/data/checkpoints/Run2026Best0123456789abc/weights.bin"),
        ("ENDPOINT", "https://example.com/v1/models/abcdefghijklmnop0123456789"),
        ("GREETING", "hello world, this is 1 sentence of more than twenty characters"),
        ("NUMBER", "31415926535897932384626433"),
        ("WORD", "antidisestablishmentarianism"),
        ("UUID_LIKE", "123e4567-e89b-12d3-a456-426614174000"),
    ],
)  # fmt: skip
def test_a_variable_that_only_resembles_a_secret_is_shown(name: str, value: str) -> None:
    assert not safe_text.is_secret(name, value)
