# SPDX-License-Identifier: Apache-2.0
"""What is shown, and what is hidden."""

from __future__ import annotations

import pytest

from openenvd.server.api.views import REDACTED, redact


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "client_secret",
        "DB_PASSWORD",
        "PGPASSWORD",
        "MYSQL_PWD",
        "OPENAI_API_KEY",
        "OPENAI_APIKEY",
        "AWS_ACCESS_KEY_ID",
        "SSH_KEY",
        "KEYS",
        "SENTRY_DSN",
        "SESSION_COOKIE",
        "BASIC_AUTH",
    ],
)
def test_a_variable_with_the_name_of_a_secret_is_hidden(name: str) -> None:
    assert redact({"env": {name: "hush"}}) == {"env": {name: REDACTED}}


@pytest.mark.parametrize("value", ["postgres://me:hush@db/x", "https://x:hush@example.com"])
def test_an_address_with_a_password_is_hidden_under_any_name(value: str) -> None:
    assert redact({"env": {"WHERE": value}}) == {"env": {"WHERE": REDACTED}}


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODEL", "small"), ("KEYBOARD", "us"), ("URL", "http://me@example.com:80/x"), ("MONKEY", "")],
)
def test_anything_else_is_shown(name: str, value: str) -> None:
    assert redact({"env": {name: value}}) == {"env": {name: value}}


def test_tokens_are_hidden_and_addresses_shown_without_them() -> None:
    payload = {"token": "hush", "name": "http://h?token=hush", "more_names": ["http://h?token=x&a"]}
    hidden = {"token": REDACTED, "name": f"http://h?token={REDACTED}"}
    assert redact(payload) == {**hidden, "more_names": [f"http://h?token={REDACTED}&a"]}
    assert redact({"token": None}) == {"token": None}


def test_a_payload_without_variables_is_shown_as_it_is() -> None:
    assert redact({"name": "trial", "env": None}) == {"name": "trial", "env": None}
