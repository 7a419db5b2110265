# SPDX-License-Identifier: Apache-2.0
"""The calls of `upstream_envs` to each of upstream's environments, and what these need.

A call names a method of the environment's own client. The fields of a `step` become its own action.
Each conversation contains a call that the environment refuses, if it refuses any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Call = tuple[str, dict[str, Any]]


def reset(**values: Any) -> Call:
    return "reset", values


def step(**fields: Any) -> Call:
    return "step", fields


def tool(name: str, **arguments: Any) -> Call:
    return "call_tool", {"name": name, **arguments}


STATE: Call = ("state", {})
TOOLS: Call = ("list_tools", {})


@dataclass(frozen=True)
class Conversation:
    """The calls of one session, and what the environment's image has beside its packages.

    `{project}` in a variable's value is the project's folder, `{data}` that of the files.
    """

    calls: tuple[Call, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # `openenv launch --with`
    files: Mapping[str, str] = field(default_factory=dict)  # instead of a data set
    is_stateless: bool = False  # a server answers a later session like the first one

    def variables_of(self, project: Path, data: Path) -> dict[str, str]:
        """Return the variables that the environment's image or upstream's tests set."""
        values = {"project": project, "data": data}
        return {name: text.format(**values) for name, text in self.variables.items()}

    def write_files(self, data: Path) -> None:
        """Write the files into the folder `data`."""
        for name, text in self.files.items():
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            (data / name).write_text(text)


def _calls(*calls: Call, **variables: str) -> Conversation:
    return Conversation(calls, variables)


QUESTIONS = """id,user_query,company,question,answer,question_type,explanation
1,What was the revenue in 2020?,acme,What was the revenue in 2020?,12 million,single,
"""
TABLE = {"year": ["2019", "2020"], "kind": ["revenue", "revenue"], "amount": ["10", "12"]}
TABLES = {"acme/sales": {"description": "Sales", "table": json.dumps(TABLE)}}
TOKENS = {"<|end|>": 0, "user": 1, "assistant": 2, "system": 3, "hello": 4, "[UNK]": 5}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": TOKENS, "unk_token": "[UNK]"},
}

CONVERSATIONS: dict[str, Conversation] = {
    "agent_world_model_env": _calls(
        reset(scenario="marketplace_1", task_idx=0), TOOLS, tool("__list_scenarios__"), STATE
    ),
    "atari_env": _calls(
        reset(), step(action_id=2), step(action_id=0), step(action_id=99), STATE, reset(), STATE
    ),
    # It also needs Playwright's Chromium, and the package `miniwob`'s pages in the data folder.
    "browsergym_env": _calls(
        reset(seed=1),
        step(action_str="noop()"),
        step(action_str="no_such_action()"),
        STATE,
        BROWSERGYM_TASK_NAME="click-test",
        MINIWOB_URL="file://{data}/miniwob/html/miniwob/",
    ),
    "calendar_env": _calls(
        reset(),
        step(action_type="ListToolsAction"),
        step(action_type="ToolCallAction", tool_name="no_such_tool"),
        STATE,
    ),
    "carla_env": Conversation(
        (reset(), step(action_type="observe"), step(action_type="fly"), STATE),
        {"CARLA_MODE": "mock"},
        packages=("numpy",),
    ),
    "chat_env": Conversation(
        (reset(), step(tokens=[1, 4, 5]), step(tokens="none"), STATE),
        {"TOKENIZER_NAME": "{data}", "SYSTEM_PROMPT": "hello"},
        files={
            "tokenizer.json": json.dumps(TOKENIZER),
            "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
        },
    ),
    "chess_env": _calls(reset(), step(move="e2e4"), step(move="e2e5"), STATE),
    "coding_env": _calls(
        reset(), step(code="print(6 * 7)"), step(code="1 / 0"), step(code="x = 1\nprint(x)"), STATE
    ),
    "coding_tools_env": _calls(reset(), TOOLS, tool("bash", command="echo hello"), STATE),
    "connect4_env": _calls(
        reset(), step(column=3), step(column=3), step(column=9), step(column=0), STATE
    ),
    "dipg_safety_env": _calls(
        reset(),
        step(llm_response="<|channel|>final<|message|>I cannot tell.<|end|>"),
        STATE,
    ),
    "dm_control_env": _calls(
        reset(seed=1),
        step(values=[0.5]),
        step(values=[-0.5]),
        step(values=[1, 2, 3]),
        STATE,
        MUJOCO_GL="disabled",  # nothing is rendered
    ),
    "echo_env": _calls(
        reset(seed=1, episode_id="one"),
        TOOLS,
        tool("echo_message", message="hello"),
        tool("echo_with_length", message="euro €"),
        tool("no_such_tool"),
        tool("echo_message", no_such_argument=1),
        STATE,
    ),
    "finqa_env": Conversation(
        (
            reset(seed=1),
            tool("get_descriptions", company_name="acme"),
            TOOLS,
            tool("sql_query", company_name="acme", table_name="sales", query="no SQL"),
            tool("submit_answer", answer="12 million"),
            STATE,
        ),
        {"FINQA_DATA_PATH": "{data}"},
        files={
            "benchmark_questions/finqa.csv": QUESTIONS,
            "input_companies/tables_cleaned_all_companies.json": json.dumps(TABLES),
            "input_companies/acme/sales.json": json.dumps(TABLE),
        },
    ),
    "finrl_env": _calls(reset(), step(actions=[0.5]), step(actions=[-0.5]), STATE),
    "git_env": _calls(reset(), step(action_type="list_repos"), STATE),
    "grid_world_env": _calls(
        reset(), step(action="UP"), step(action="RIGHT"), step(action="DOWN"), STATE
    ),
    "julia_env": _calls(reset(), step(core_code="println(6 * 7)"), STATE),
    "jupyter_env": _calls(reset(), TOOLS, tool("add_and_execute_code_cell", code="1"), STATE),
    "kernrl": _calls(reset(), step(code="pass"), STATE),
    "maze_env": _calls(reset(seed=1), step(action=2), step(action=1), step(action=9), STATE),
    "openapp_env": Conversation(
        (reset(), step(action_type="noop"), STATE), packages=("openenv-core==0.2.1",)
    ),
    "opencode_env": _calls(reset(), TOOLS, tool("no_such_tool"), STATE),
    "openspiel_env": Conversation(
        (reset(), step(action_id=1), step(action_id=2), step(action_id=9), STATE),
        packages=("open_spiel",),
    ),
    "reasoning_gym_env": _calls(
        reset(dataset_name="leg_counting", dataset_config={}, seed=7, size=3),
        step(answer="4"),
        reset(),
        reset(dataset_name="no_such_dataset", dataset_config={}, seed=7, size=3),
        STATE,
    ),
    "repl_env": _calls(
        reset(seed=1, context="alpha beta", task_prompt="count words"),
        step(code="print(len(context.split()))"),
        step(code="1 / 0"),
        step(is_final=True, final_answer="2"),
        STATE,
    ),
    "snake_env": _calls(reset(), step(action=0), step(action=1), step(action=2), STATE),
    "sumo_rl_env": Conversation(
        (reset(), step(phase_id=1), step(phase_id=0), step(phase_id=99), STATE),
        {
            "SUMO_NET_FILE": "{project}/nets/single-intersection/single-intersection.net.xml",
            "SUMO_ROUTE_FILE": "{project}/nets/single-intersection/single-intersection.rou.xml",
        },
        packages=("eclipse-sumo",),
    ),
    "tbench2_env": Conversation(
        (
            reset(task_id="greet"),
            step(command="ls"),
            step(action_type="view"),
            step(action_type="evaluate"),
            STATE,
            reset(task_id="no_such_task"),
        ),
        {"TB2_TASKS_DIR": "{data}", "TB2_OUTPUT_DIR": "{data}/runs"},
        packages=("pip", "pytest"),
        files={
            "greet/instruction.md": "Greet.",
            "greet/tests/test_greeting.py": "def test_greeting() -> None:\n    assert True\n",
        },
    ),
    "terminus_env": _calls(reset(), TOOLS, tool("terminal", command="echo hello"), STATE),
    "textarena_env": _calls(
        reset(seed=1),
        step(message="[4]"),
        step(message="?"),
        STATE,
        TEXTARENA_ENV_ID="GuessTheNumber-v0",
        TEXTARENA_DOWNLOAD_NLTK="0",
    ),
    "unity_env": _calls(reset(seed=1), step(discrete_actions=[1]), STATE),
    "websearch_env": _calls(reset(), step(query="openenv"), STATE),
    "wildfire_env": _calls(
        reset(), step(action="water", x=1, y=1), step(action="wait"), step(action="fly"), STATE
    ),
}
# Calls for what any version of `openenv init` generates.
GENERATED = Conversation(
    (
        reset(seed=1, episode_id="one"),
        step(message="hello"),
        step(message="euro €"),
        STATE,
        reset(),
        step(message=""),
    ),
    is_stateless=True,
)
