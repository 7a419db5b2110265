# SPDX-License-Identifier: Apache-2.0
"""Lines of `openenv play`: actions by the schema, completion, pictures in a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from openenvd.cli.commands.play import PlayError, candidates, read_action, shown_image
from openenvd.rollouts.images import Image

TEXT = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
MOVE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "row": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "side": {"$ref": "#/$defs/Side"},
        "is_last": {"type": "boolean"},
        "metadata": {"type": "object"},
    },
    "required": ["side"],
    "$defs": {"Side": {"type": "string", "enum": ["left", "right"]}},
}
PNG = Image("image/png", b"x" * 4000, 1, 1)


@pytest.mark.parametrize(
    ("schema", "line", "action"),
    [
        (TEXT, "hi there", {"message": "hi there"}),
        (TEXT, "a=b", {"message": "a=b"}),
        (TEXT, "message='a b'", {"message": "a b"}),
        (TEXT, '{"message": "x"}', {"message": "x"}),
        (MOVE, "side=left row=3 is_last=true", {"side": "left", "row": 3, "is_last": True}),
        (MOVE, "side=left row=null", {"side": "left", "row": None}),
        ({"oneOf": []}, '{"any": [1]}', {"any": [1]}),
    ],
)
def test_an_action_is_read_by_its_schema(schema: Any, line: str, action: Any) -> None:
    assert read_action(line, schema) == action


@pytest.mark.parametrize(
    ("schema", "line", "words"),
    [
        (TEXT, "{", "no JSON"),
        (TEXT, '{"a": 1}', "missing: message"),
        (MOVE, "row=1", "missing: side"),
        (MOVE, "side=up", "side: 'up' is none of left, right"),
        (MOVE, "side=left row=x", "row: 'x' is not of type integer"),
        (MOVE, "side=left col=1", "unknown: col; the fields are: row, side, is_last"),
        (MOVE, "left", "'left' is not FIELD=VALUE; the fields are"),
        (MOVE, "side='left", "quote as in a shell"),
        ({"oneOf": []}, "left", "write a JSON object"),
    ],
)
def test_a_wrong_action_is_refused_by_the_name_of_its_field(
    schema: Any, line: str, words: str
) -> None:
    with pytest.raises(PlayError, match=words):
        read_action(line, schema)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("re", ["reset"]),
        ("s", ["step", "state", "schema", "save", "side="]),
        ("side=l", ["side=left "]),
        ("row=1 is_last=", ["is_last=true ", "is_last=false "]),
        ("row=1 s", ["side="]),
    ],
)
def test_commands_fields_and_values_are_completed(line: str, found: list[str]) -> None:
    assert candidates(line, MOVE) == found


def test_a_picture_is_shown_by_the_protocol_of_the_terminal() -> None:
    assert shown_image(PNG, {"TERM": "xterm"}) is None
    assert (shown_image(PNG, {"TERM_PROGRAM": "WezTerm"}) or "").startswith("\x1b]1337;File=inline")
    kitty = (shown_image(PNG, {"KITTY_WINDOW_ID": "1"}) or "").split("\x1b\\")
    assert [part.partition(";")[0] for part in kitty] == ["\x1b_Ga=T,f=100,m=1", "\x1b_Gm=0", ""]
