# SPDX-License-Identifier: Apache-2.0
"""What is shown, and what is hidden."""

from __future__ import annotations

import json

import pytest

from openenvd.requests_db.records import Environment, Replica, RequestError
from openenvd.schema.states import EnvironmentState, ErrorKind, ReplicaState
from openenvd.server.api.views import (
    environment_view,
    error_view,
    gpus_of,
    replica_view,
    sessions_fail,
)
from openenvd.system.text.hidden_values import REDACTED, redact


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
        "PASS",
        "DB_PASS",
        "SMTPPASS",
        "SSH_PASSPHRASE",
        "GITHUB_PAT",
        "PAT",
        "JWT",
        "MY_JWT_1",
        "AZURE_STORAGE_CONNECTION_STRING",
        "ConnectionString",
    ],
)
def test_a_variable_with_the_name_of_a_secret_is_hidden(name: str) -> None:
    assert redact({"env": {name: "hush"}}) == {"env": {name: REDACTED}}


@pytest.mark.parametrize("value", ["postgres://me:hush@db/x", "https://x:hush@example.com"])
def test_an_address_with_a_password_is_hidden_under_any_name(value: str) -> None:
    assert redact({"env": {"WHERE": value}}) == {"env": {"WHERE": REDACTED}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL", "small"),
        ("KEYBOARD", "us"),
        ("URL", "http://me@example.com:80/x"),
        ("MONKEY", ""),
        ("PATH", "/bin"),
        ("PATTERN", "x*"),
        ("BYPASS", "1"),
        ("COMPASS", "north"),
        ("PASSENGERS", "4"),
    ],
)
def test_anything_else_is_shown(name: str, value: str) -> None:
    assert redact({"env": {name: value}}) == {"env": {name: value}}


def test_tokens_are_hidden_and_addresses_shown_without_them() -> None:
    payload = {"token": "hush", "name": "http://h?token=hush", "more_names": ["http://h?token=x&a"]}
    hidden = {"token": REDACTED, "name": f"http://h?token={REDACTED}"}
    assert redact(payload) == {**hidden, "more_names": [f"http://h?token={REDACTED}&a"]}
    assert redact({"token": None}) == {"token": None}


def test_the_variables_of_a_patched_pod_are_hidden_as_others_are() -> None:
    variables = [{"name": "API_KEY", "value": "hush"}, {"name": "MODEL", "value": "small"}]
    options = ["namespace=lab", "image-pull-secret=regcred", "memory=1e3"]
    patch = {"spec": {"containers": [{"env": variables, "tty": True}]}}
    shown = redact({"engine_options": [*options, f"patch={json.dumps(patch)}"]})["engine_options"]
    variables[0]["value"] = REDACTED
    assert shown[:3] == options
    assert json.loads(shown[3].removeprefix("patch=")) == patch


def test_what_replicas_say_is_shown_without_credentials() -> None:
    live = {"problem": "GET https://me:hush@registry/v2: 401", "sessions_fail": "no db://x:hush@h"}
    replica = Replica("trial-0", "trial", 0, "docker", ReplicaState.STARTING, "/run", 1.0)
    told = f"{replica_view(replica, live)['message']} {sessions_fail([live])}"
    assert told == f"GET https://{REDACTED}@registry/v2: 401 no db://{REDACTED}@h"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("openai:http://me:hush@h/v1", f"openai:http://{REDACTED}@h/v1"),
        ("openai:https://h/v1?api_key=hush&n=1", f"openai:https://h/v1?api_key={REDACTED}&n=1"),
        ("git+https://ghp_0123456789abcdef@h/r", f"git+https://{REDACTED}@h/r"),
        ("https://me:hu@sh/x@h/r", f"https://{REDACTED}@h/r"),
        ("git+ssh://git@h:22/r@main", "git+ssh://git@h:22/r@main"),
        ("module:function", "module:function"),
    ],
)
def test_credentials_in_urls_are_hidden_wherever_they_stand(value: str, shown: str) -> None:
    assert redact({"policy": value, "source": value}) == {"policy": shown, "source": shown}
    assert redact({"more_names": [value]}) == {"more_names": [shown]}
    failed = RequestError(ErrorKind.OPERATION_ERROR, f"cannot reach {value}", hint=value)
    told = error_view(failed, {})
    assert told is not None
    assert (told["message"], told["hint"]) == (f"cannot reach {shown}", shown)


def test_a_failure_is_shown_without_the_secrets_that_its_request_had() -> None:
    failed = RequestError(
        ErrorKind.OPERATION_ERROR,
        "no access with hush-hush at home",
        log_tail=("key: hush-hush", "token: 0123456789abcdef"),
        evidence={"evidence": ["hush-hush"]},
    )
    payload = {"env": {"API_KEY": "hush-hush", "PLACE": "home"}, "token": "0123456789abcdef"}
    told = error_view(failed, payload)
    assert told is not None
    assert told["message"] == f"no access with {REDACTED} at home"
    assert told["log_tail"] == [f"key: {REDACTED}", f"token: {REDACTED}"]
    assert told["evidence"] == {"evidence": [REDACTED]}


def test_why_sessions_fail_is_shown_without_the_secrets_of_the_environment() -> None:
    spec = {"env": {"API_KEY": "hush-hush"}}
    environment = Environment("trial", spec, EnvironmentState.READY, 1.0, 1.0)
    replica = Replica("trial-0", "trial", 0, "docker", ReplicaState.READY, "/run", 1.0)
    live = {"sessions_fail": "KeyError: hush-hush", "problem": "no hush-hush"}
    shown = environment_view(environment, [replica], {replica.id: live})
    assert shown["state"] == "FAILING"
    assert "hush" not in json.dumps(shown)


def test_a_payload_without_variables_is_shown_as_it_is() -> None:
    assert redact({"name": "trial", "env": None}) == {"name": "trial", "env": None}


def test_what_replicas_have_of_gpus_is_told_also_a_share_of_one() -> None:
    part = {"gpus": 1, "engine_options": ["gpu-resource=nvidia.com/mig-1g.5gb", "namespace=rl"]}
    assert gpus_of(part) == {"each": 1, "resource": "nvidia.com/mig-1g.5gb"}
    assert gpus_of({"gpus": None, "engine_options": ["gpus=0.25"]}) == {
        "each": 0.25,
        "resource": None,
    }
    shard = {"gpus": 1, "engine_options": ["gres=shard:2"]}
    assert gpus_of(shard) == {"each": 1, "resource": "shard:2"}
    assert gpus_of({"gpus": None, "engine_options": ["gpus=nan"]}) is None
    assert gpus_of({"gpus": None, "engine_options": ["gpus=inf"]}) is None
    assert gpus_of({}) is None
    assert gpus_of({"engine_options": ["gpus=all"]}) is None
