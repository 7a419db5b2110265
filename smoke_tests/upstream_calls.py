# SPDX-License-Identifier: Apache-2.0
"""What `upstream_envs` asks of each of upstream's environments, and what they need for it.

A call names a method of the environment's own client. The fields of a `step` become its own action.
Each conversation has something that the environment refuses, where it refuses anything.
"""

from __future__ import annotations

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
    """The calls of one session; `{project}` in a variable's value is the project's folder."""

    calls: tuple[Call, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def variables_of(self, project: Path) -> dict[str, str]:
        """What the environment's image sets, or a fixture of upstream's tests."""
        return {name: text.format(project=project) for name, text in self.variables.items()}


def _calls(*calls: Call, **variables: str) -> Conversation:
    return Conversation(calls, variables)


CONVERSATIONS: dict[str, Conversation] = {
    "agent_world_model_env": _calls(
        reset(scenario="marketplace_1", task_idx=0), TOOLS, tool("__list_scenarios__"), STATE
    ),
    "atari_env": _calls(
        reset(), step(action_id=2), step(action_id=0), step(action_id=99), STATE, reset(), STATE
    ),
    "browsergym_env": _calls(reset(seed=1), step(action_str="noop()"), STATE),
    "calendar_env": _calls(
        reset(),
        step(action_type="ListToolsAction"),
        step(action_type="ToolCallAction", tool_name="no_such_tool"),
        STATE,
    ),
    "carla_env": _calls(reset(), step(action_type="observe"), STATE, CARLA_MODE="mock"),
    "chat_env": _calls(reset(), step(tokens=[1, 2, 3]), STATE),
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
        reset(seed=1), step(values=[0.5]), step(values=[-0.5]), step(values=[1, 2, 3]), STATE
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
    "finqa_env": _calls(reset(seed=1), TOOLS, tool("submit_answer", answer="1"), STATE),
    "finrl_env": _calls(reset(), step(actions=[0.5]), step(actions=[-0.5]), STATE),
    "git_env": _calls(reset(), step(action_type="list_repos"), STATE),
    "grid_world_env": _calls(
        reset(), step(action="UP"), step(action="RIGHT"), step(action="DOWN"), STATE
    ),
    "julia_env": _calls(reset(), step(core_code="println(6 * 7)"), STATE),
    "jupyter_env": _calls(reset(), TOOLS, tool("add_and_execute_code_cell", code="1"), STATE),
    "kernrl": _calls(reset(), step(code="pass"), STATE),
    "maze_env": _calls(reset(seed=1), step(action=2), step(action=1), step(action=9), STATE),
    "openapp_env": _calls(reset(), step(action_type="noop"), STATE),
    "opencode_env": _calls(reset(), TOOLS, tool("no_such_tool"), STATE),
    "openspiel_env": _calls(reset(), step(action_id=1), step(action_id=2), STATE),
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
    "sumo_rl_env": _calls(
        reset(),
        step(phase_id=1),
        step(phase_id=0),
        step(phase_id=99),
        STATE,
        SUMO_NET_FILE="{project}/nets/single-intersection/single-intersection.net.xml",
        SUMO_ROUTE_FILE="{project}/nets/single-intersection/single-intersection.rou.xml",
    ),
    "tbench2_env": _calls(reset(), step(command="ls"), STATE),
    "terminus_env": _calls(reset(), TOOLS, tool("terminal", command="echo hello"), STATE),
    "textarena_env": _calls(reset(seed=1), step(message="[crane]"), step(message="?"), STATE),
    "unity_env": _calls(reset(seed=1), step(discrete_actions=[1]), STATE),
    "websearch_env": _calls(reset(), step(query="openenv"), STATE),
    "wildfire_env": _calls(
        reset(), step(action="water", x=1, y=1), step(action="wait"), step(action="fly"), STATE
    ),
}
# What `openenv init` generates, whichever version of it.
GENERATED = _calls(
    reset(seed=1, episode_id="one"),
    step(message="hello"),
    step(message="euro €"),
    STATE,
    reset(),
    step(message=""),
)
