# SPDX-License-Identifier: Apache-2.0
"""`openenv rollout`: what is sent, and what is told of the result."""

import asyncio
from pathlib import Path
from typing import Any

import click
import pytest

from openenvd.cli.commands.play import candidates, read_action, shown_image
from openenvd.cli.commands.rollout import _conclude, _summary
from openenvd.cli.commands.rollout_show import episode_lines, summary_lines
from openenvd.cli.options import given_options
from openenvd.client.sources import rollout_payload
from openenvd.rollouts.images import Image
from openenvd.rollouts.play import CallFailed
from openenvd.rollouts.replay import histogram
from openenvd.schema.operation_options import RolloutOptions

from ..client.fake_daemon import Call, new_environment, new_request
from ..rollouts.made import written
from .conftest import Cli

NOTHING: dict[str, Any] = {"out": "out"}


def _payload(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    return rollout_payload(names, options["out"], given_options(RolloutOptions, options))


def test_rollout_sends_the_given_options_stages_and_a_models_key_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert _payload(("echo",), NOTHING) == {"name": "echo", "out": f"{here}/out", "cwd": here}
    said = {**NOTHING, "episodes": 8, "seed": 0, "retries": 0, "out": "/elsewhere"}
    assert _payload(("echo", "http://h:1"), said) == {
        "name": "echo",
        "more_names": ["http://h:1"],
        "out": "/elsewhere",
        "cwd": here,
        "episodes": 8,
        "seed": 0,
        "retries": 0,
    }
    said = {"group": 4, "advantages": "leave-one-out", "filters": ("min-steps=3", "failed")}
    sent = _payload(("echo",), {**NOTHING, **said, "policy_timeout_seconds": 2.5})
    assert {key: sent[key] for key in said} == {**said, "filters": ["min-steps=3", "failed"]}
    assert sent["policy_timeout_seconds"] == 2.5
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.delenv("OPENAI_MODEL", raising=False)
    chat = _payload(("echo",), {**NOTHING, "policy": "openai:http://h/v1"})
    assert chat["env"] == {"OPENAI_API_KEY": "k"}
    assert "env" not in _payload(("echo",), {**NOTHING, "policy": "random"})


def test_a_misspelled_environment_is_refused_before_anything_is_queued(cli: Cli) -> None:
    unknown(cli, "ecko", hint="did you mean echo?", near=["echo"])
    answer = cli("rollout", "http://127.0.0.1:1", "ecko", "--out", "out")
    assert answer.code == 4
    assert "did you mean echo?" in answer.err
    assert submitted(cli) == []


def unknown(cli: Cli, name: str, **more: Any) -> None:
    error: dict[str, Any] = {"kind": "not_found"}
    error |= {"message": f"no environment is called {name!r}"}
    error |= {"hint": "openenv status lists them", "near": [], **more}
    cli.get(f"/v1/environments/{name}", (404, {"error": error}))


def accepts(cli: Cli, *ends: dict[str, Any]) -> None:
    """Take requests one after the other, each of which ends as given."""
    left = list(ends)

    def answer(call: Call) -> None:
        request = left.pop(0)
        call.json(202, {"request_id": request["id"], "request": {**request, "state": "PENDING"}})

    cli.post("/v1/requests", answer)
    for request in ends:
        cli.ends(request)


def submitted(cli: Cli) -> list[tuple[str, str]]:
    return [(body["operation"], body["payload"]["name"]) for body in cli.sent()]


NO_ROOM = {"kind": "operation_error", "message": "no room", "hint": None}
ROLLED_OUT = new_request("2", operation="rollout", payload={"out": "out"}, error=None)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("echo", [], "echo is not running\n  openenv launch echo first, or add --launch"),
        ("x" * 300, [], "no environment is called 'xxx"),  # which cannot be a path
        ("~nobody-here", [], "no environment is called '~nobody-here'"),
    ],
)
def test_an_environment_that_does_not_run_is_offered_to_be_launched_where_it_can_be(
    cli: Cli, name: str, words: list[str], expected: str
) -> None:
    unknown(cli, name)
    answer = cli("rollout", name, "--out", "out", *words)
    assert answer.code == 4
    assert expected in answer.err
    assert submitted(cli) == []


def test_one_that_has_failed_or_was_taken_down_is_offered_with_its_source(cli: Cli) -> None:
    for state in ("FAILED", "STOPPED"):
        cli.knows(new_environment(state=state, source="/work/my env"))
        answer = cli("rollout", "trial", "--out", "out")
        assert answer.code == 4
        assert "openenv launch '/work/my env' --name trial first" in answer.err


def test_with_launch_what_does_not_run_is_launched_first(cli: Cli) -> None:
    unknown(cli, "echo")
    cli.knows(new_environment())
    accepts(cli, new_request("1", environment="echo"), ROLLED_OUT)
    answer = cli("rollout", "trial", "echo", "--out", "out", "--launch", "--async")
    assert answer.code == 0, answer.err
    assert submitted(cli) == [("launch", "echo"), ("rollout", "trial")]


def test_a_folder_means_the_environment_that_is_launched_from_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest names it, on the command line and in the hint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "openenv.yaml").write_text("name: chess\n")
    unknown(cli, "chess")
    answer = cli("rollout", "./mine", "--out", "out")
    assert answer.code == 4
    assert "openenv launch ./mine first, or add --launch" in answer.err
    accepts(cli, new_request("1", environment="chess"), ROLLED_OUT)
    answer = cli("rollout", "./mine", "--out", "out", "--launch", "--async")
    assert answer.code == 0, answer.err
    assert submitted(cli) == [("launch", "chess"), ("rollout", "chess")]


def test_nothing_is_rolled_out_when_the_launch_has_failed(cli: Cli) -> None:
    unknown(cli, "echo")
    accepts(cli, new_request("1", environment="echo", state="FAILED", error=NO_ROOM), ROLLED_OUT)
    answer = cli("rollout", "echo", "--out", "out", "--launch", "--json")
    assert answer.code == 1
    assert answer.json["error"]["message"] == "no room"
    assert submitted(cli) == [("launch", "echo")]


def test_one_that_is_being_launched_is_waited_for(cli: Cli) -> None:
    cli.knows(new_environment(state="PENDING", request_id="1", replicas=[]))
    accepts(cli, ROLLED_OUT)
    cli.ends(new_request("1", state="FAILED", error=NO_ROOM))
    assert cli("rollout", "trial", "--out", "out").code == 1
    assert submitted(cli) == []
    cli.ends(new_request("1"))
    cli("rollout", "trial", "--out", "out")
    assert submitted(cli) == [("rollout", "trial")]


def result_of(**told: Any) -> dict[str, Any]:
    """What the daemon tells of a rollout in which all went well, but for what is `told`."""
    return {
        "unit": "episode", "episodes": 8,
        "wanted": 8, "earlier": 0, "there": 8, "out": "/out", "steps": 0, "mean_reward": None,
        "truncated": 0, "truncated_mean_reward": None, "max_steps": 100, "odd_rewards": {},
        "damaged": [],
        "failures": {}, "last_failures": {}, "filtered": {}, "left_out": 0, "kept_failed": False,
        "lag": {"p99_seconds": 0.0}, **told,
    }  # fmt: skip


def summary(**told: Any) -> str:
    return click.unstyle("".join(f"{line}\n" for line in _summary(result_of(**told))))


def test_the_summary_counts_episodes_and_failures() -> None:
    text = summary(
        wanted=10, there=7, steps=1200, seconds=2.0, steps_per_second=600.0, mean_reward=0.5,
        failures={"policy_error": 1, "step_timed_out": 2},
        last_failures={"step_timed_out": "the step took\nmore than 5 s", "policy_error": "no"},
    )  # fmt: skip
    assert text.splitlines() == [
        "! 7 of 10 episodes are in /out",
        "  1,200 steps in 2.0 s (600 steps/s)",
        "  mean reward 0.5",
        "  3 failed: 2 step timed out, 1 policy error",
        "    step timed out: the step took more than 5 s",
        "  failed ones are left out; --keep-failed writes them up to the failure",
        "  the same command plays the missing ones",
    ]


def test_the_summary_counts_trees_and_their_episodes() -> None:
    text = summary(
        unit="tree", episodes=512, steps=1200, seconds=2.0, steps_per_second=600.0, truncated=512
    )
    assert text.splitlines()[:3] == [
        "✓ 8 of 8 trees are in /out",
        "  512 episodes, 1,200 steps in 2.0 s (600 steps/s)",
        "  512 truncated at 100 steps",
    ]


def test_the_summary_tells_truncated_damaged_and_dropped_episodes_and_odd_rewards() -> None:
    assert "  8 truncated at 100 steps; their mean reward 0.25\n" in summary(
        truncated=8, truncated_mean_reward=0.25
    )
    text = summary(mean_reward=1.0, truncated=1, truncated_mean_reward=None, max_steps=1)
    assert "  mean reward 1\n  1 truncated at 1 step\n" in text
    text = summary(damaged=["packs/00000.jsonl was removed"])
    assert "  packs/00000.jsonl was removed\n" in text
    text = summary(odd_rewards={'"high"': 1, "NaN": 12}, episodes_with_odd_rewards=3)
    assert "  3 episodes with rewards that are no numbers, left out of the mean: " in text
    assert ': 12 NaN, 1 "high"\n' in text
    text = summary(
        there=4, failures={"policy_error": 1}, left_out=3,
        filtered={"my.filters:odd": 1, "min-steps=3": 2},
    )  # fmt: skip
    assert "  3 dropped: 2 min-steps=3, 1 my.filters:odd\n" in text
    assert "  3 successful ones are left out with their groups\n" in text


def test_of_a_success_nothing_is_missing_nor_failed_episodes_that_are_kept() -> None:
    assert summary(earlier=8).startswith("✓ 8 of 8 episodes are in /out\n")
    one = summary(wanted=1, there=1, steps=1, seconds=0.5, steps_per_second=2.0)
    assert one.startswith("✓ 1 of 1 episode is in /out\n  1 step in 0.5 s (2 steps/s)\n")
    assert "missing" not in summary(earlier=8)
    text = summary(failures={"policy_error": 1}, kept_failed=True)
    assert "✓ 8 of 8 episodes are in /out\n  1 failed: 1 policy error" in text
    assert "--keep-failed" not in text
    assert "missing" not in text


def test_a_cancelled_rollout_prints_how_to_continue_it() -> None:
    told, lines = _conclude({"state": "CANCELLED", "result": None})
    assert told == {"rollout": None}
    assert lines == ["  finished episodes are kept: the same command plays the missing ones"]
    assert _conclude({"state": "FAILED", "result": None}) == ({"rollout": None}, [])


def test_a_folder_of_rollouts_is_shown_and_one_of_its_episodes(cli: Cli, tmp_path: Path) -> None:
    asyncio.run(written(tmp_path / "out", "000000", "000001", reward=3.0))
    shown = cli("rollout", "show", str(tmp_path / "out"))
    assert "2 episodes, 6 steps: 2 done" in shown.out
    assert "rewards of done episodes, mean 3" in shown.out
    episode = cli("rollout", "show", str(tmp_path / "out"), "1")
    assert "episode 000001 of ws://env, seed 7: done, 3 steps, total reward 3" in episode.out
    assert '→ {"move": 2}  reward 2' in episode.out
    assert cli("rollout", "show", str(tmp_path / "out"), "2").code == 4
    assert cli("rollout", "show", str(tmp_path / "none")).code == 1
    assert cli("rollout", "show").code == 2
    told = cli("rollout", "echo").err
    assert "Missing option '--out'.\nFor example: openenv rollout echo --out episodes" in told


def test_a_histogram_has_a_line_for_each_span_with_rewards_and_no_seed_is_not_named() -> None:
    found: dict[str, Any] = {"episodes": 9, "steps": 9, "statuses": {"done": 9}, "failures": {}}
    found |= {"episodes_with_odd_rewards": 0, "rewards_of": "done"}
    lines = summary_lines("out", {**found, "histogram": histogram([0.0] * 3 + [1.0] * 6)})
    assert [line.split()[-1] for line in lines[3:]] == ["3", "6"]
    about: dict[str, Any] = {
        "episode_id": "1",
        "environment": "echo",
        "seed": None,
        "status": "done",
        "steps": 1,
    }
    about |= {"total_reward": 1.0, "failure_reason": None}
    [line] = episode_lines({"episode": about, "steps": []})
    assert line == "episode 1 of echo: done, 1 step, total reward 1"


# Lines of `openenv play`: actions by the schema, completion, pictures in a terminal.


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
        (MOVE, "side=left row=x", "row: 'x' is not of type integer"),
        (MOVE, "left", "'left' is not FIELD=VALUE; the fields are"),
        (MOVE, "side='left", "quote as in a shell"),
        ({"oneOf": []}, "left", "write a JSON object"),
    ],
)
def test_a_wrong_action_is_refused_by_the_name_of_its_field(
    schema: Any, line: str, words: str
) -> None:
    with pytest.raises(CallFailed, match=words):
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
