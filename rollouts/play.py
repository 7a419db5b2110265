# SPDX-License-Identifier: Apache-2.0
"""`Game` plays an environment by hand, for `openenv play` and for pages of the dashboard.

The module is also the program of such a page:

    page ──POST──▶ daemon ──a line of JSON──▶ `python -m openenvd.rollouts.play` ──session──▶ server
                          ◀─ length, answer ─┘

Each page that plays has a process of its own, for the reason of `replay.py`. The process ends with
its input, and after `IDLE_SECONDS` without a call, so that a closed page does not keep a session. A
call is a JSON object:
    begin       `address` (with its token), `environment`, `source`: opens the session; the answer
                has the fields of an action (`properties`, `required`)
    reset       `data`, its arguments         the answer to reset, step and random: observation,
    step        `data`, the action            images apart as in `rollouts.replay`, reward, done,
    random                                    action, and of a reset the episode's number
    state       the environment's state
    save        `path`, `number`: see `Game.save`
The answer to a call that failed is `{"error": {"message", "hint", "field"}}`.
"""

from __future__ import annotations

import json
import select
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any

from ..env_host.errors import WSErrorCode
from ..schema.errors import HintedError
from ..system.text.json_lines import Json
from ..system.text.units import MB
from .episodes import Episode, EpisodeStatus, Step, episode_id
from .errors import RolloutError
from .images import take_images
from .policies.random_policy import action_schema, properties, sample
from .replay import MAX_MEMORY_BYTES, encoded, image_views, limit_memory, text_view
from .session.loop_thread import loop_thread, run_on_thread
from .session.session import Session, SessionFailed, error_text

IDLE_SECONDS = 900.0
ANSWER_SECONDS = 60.0
PING_SECONDS = 20.0
_PYTEST = '''\
"""An episode that was played by hand: pytest --openenv-source={source}"""

import json

EPISODE = json.loads(r"""
{episode}
""")


def test_the_episode_is_answered_as_it_was_played(openenv_session):
    answer = openenv_session.reset(**EPISODE["reset"])
    assert answer.observation == EPISODE["first"]
    for step in EPISODE["steps"]:
        answer = openenv_session.step(step["action"])
        found = {{"observation": answer.observation, "reward": answer.reward, "done": answer.done}}
        assert found == step["answer"], step["action"]
'''


class CallFailed(HintedError):
    """A call cannot be carried out; `field` is the action's that is wrong, or empty."""

    def __init__(self, message: str, hint: str | None = None, field: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


FAILURES = (CallFailed, RolloutError, SessionFailed, ValueError)  # the last: an answer is no JSON


@dataclass
class Played:
    """A played episode: the arguments of its reset, and each action with its answer.

    An answer has `observation`, `reward` and `done`.
    """

    reset: Json
    first: Json
    steps: list[tuple[Json, Json]] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)
    finished_at: float = 0.0
    saved: dict[tuple[Path, int], str] = field(default_factory=dict)  # id, by folder and length

    def save_test(self, path: Path, source: str) -> None:
        """Write a test for the pytest plug-in that repeats the episode and expects its answers."""
        steps = [{"action": action, "answer": answer} for action, answer in self.steps]
        episode = {"reset": self.reset, "first": self.first["observation"], "steps": steps}
        text = json.dumps(episode, indent=1)  # JSON never contains three quotes in a row
        with path.open("x") as file:
            file.write(_PYTEST.format(source=source, episode=text))

    def episode(self, number: int, environment: str) -> Episode:
        """Return the episode with that number in a folder of rollouts."""
        last, steps = self.first, list[Step]()
        for action, answer in self.steps:
            steps.append(Step.of(last["observation"], action, answer["reward"], answer["done"]))
            last = answer
        return Episode(
            id=episode_id(number),
            environment=environment,
            seed=self.reset.get("seed"),
            steps=tuple(steps),
            total_reward=sum(step.reward or 0.0 for step in steps),
            status=EpisodeStatus.DONE if last["done"] else EpisodeStatus.TRUNCATED,
            started_at=self.started_at,
            finished_at=self.finished_at,
            final_observation_json=json.dumps(last["observation"]).encode(),
        )


class Game:
    """A session that is played by hand, and its episodes. A method raises one of `FAILURES`."""

    def __init__(self, address: str, environment: str, source: str) -> None:
        """Open a session at an address, with its token; the rest is for what will be saved."""
        self._address, self._environment, self._source = address, environment, source
        self._session = self._open()
        self.schema = action_schema(address)
        self._episodes: list[Played] = []

    @property
    def episodes(self) -> list[Played]:
        """The episodes with a step, in the order in which they were played."""
        return [each for each in self._episodes if each.steps]

    def reset(self, arguments: Json) -> Json:
        """Begin an episode, in a new session if the last one has ended; return the answer."""
        if not self._session.is_open:  # its server was replaced
            self._session = self._open()
        answer = self.ask("reset", arguments)
        self._episodes = [*self.episodes, Played(arguments, answer)]
        return answer

    def step(self, action: Json) -> Json:
        """Take a step, and return the answer."""
        answer = self.ask("step", action)
        if self._episodes:
            self._episodes[-1].steps.append((action, answer))
            self._episodes[-1].finished_at = time.time()
        return answer

    def random_action(self) -> Any:
        """Draw an action from the schema."""
        return sample(self.schema, SystemRandom())

    def save(self, path: Path, number: int = -1) -> Json:
        """Save what was played; return the numbers of `episodes` and `steps` that were written.

        Args:
            path: `NAME.py`: a test for pytest of one episode. Otherwise a folder of rollouts, to
                which all episodes are added that are not there.
            number: The episode of a test, from 0; -1: the last.
        """
        played = self.episodes
        if not played[number:]:
            nothing = "nothing was played: an episode begins with a reset, and has a step"
            raise CallFailed(f"the last episode is {len(played) - 1}" if played else nothing)
        try:
            if path.suffix == ".py":
                played = [played[number]]
                played[0].save_test(path, self._source)
            else:
                played = run_on_thread(self._add_to(path, played))
        except OSError as exc:
            raise CallFailed(str(exc)) from exc
        return {"episodes": len(played), "steps": sum(len(each.steps) for each in played)}

    async def _add_to(self, folder: Path, played: list[Played]) -> list[Played]:
        from .folder.writer import RolloutWriter

        async with await RolloutWriter.open(folder) as writer:
            there = writer.finished_episode_ids()
            new = [p for p in played if p.saved.get((folder, len(p.steps))) not in there]
            for number, each in enumerate(new, len(there)):
                each.saved[folder, len(each.steps)] = episode_id(number)
                await writer.put(each.episode(number, self._environment))
        return new

    def _open(self) -> Session:
        return loop_thread().call(Session.open(self._address, ping_seconds=PING_SECONDS))

    def close(self) -> None:
        """End the session."""
        loop_thread().call(self._session.close())

    def ask(self, kind: str, data: Json | None = None) -> Json:
        """Send a message of OpenEnv's protocol; return what is in its answer."""
        message = json.dumps({"type": kind} | ({} if data is None else {"data": data}))
        text = loop_thread().call(self._session.ask(message, ANSWER_SECONDS, kind))
        answer = json.loads(text)
        found: Json = answer.get("data") or {}
        if answer.get("type") == "error":
            raise _refused(found, self._environment)
        if kind == "state":
            return found
        observed = {"reward": found.get("reward"), "done": bool(found.get("done"))}
        return {"observation": found.get("observation") or {}, **observed}


def _refused(error: Json, environment: str) -> CallFailed:
    """Return the error for an answer that is one, with the exception's class and place."""
    if error.get("code") == WSErrorCode.SESSION_NOT_RESET:
        return CallFailed("reset begins an episode")
    is_raised = "exception" in error
    if not is_raised and (errors := error.get("errors")):
        first = errors[0]
        return CallFailed(first["msg"], None, str((first["loc"] or [""])[0]))
    hint = error.get("hint") or (f"openenv logs {environment}" if is_raised else None)
    return CallFailed(error_text(error), hint)


def answer_to(call: Json, game: Game) -> Json:
    """Carry out a call of a page, and return its answer."""
    data: Json = call["data"]
    match call["call"]:
        case "begin":
            fields = properties(game.schema)
            return {"properties": fields, "required": game.schema.get("required", [])}
        case "reset":
            return {**_view(game.reset(data)), "episode": len(game.episodes)}
        case "step" | "random" as kind:
            action = data if kind == "step" else game.random_action()
            return {**_view(game.step(action)), "action": text_view(action)}
        case "state":
            return {"state": text_view(game.ask("state"))}
        case _:
            return game.save(Path(data["path"]).expanduser(), data["number"])


def _view(answer: Json) -> Json:
    rest, images = take_images(answer["observation"])
    return {**answer, "observation": text_view(rest), "images": image_views(images)}


def main() -> int:
    """Answer calls until there are no more."""
    limit_memory()
    game: Game | None = None
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0] and (line := sys.stdin.readline()):
        try:
            call = json.loads(line)
            game = game or Game(**call["data"])  # the first call is `begin`
            answer = answer_to(call, game)
        except FAILURES as exc:
            hint, of = getattr(exc, "hint", None), getattr(exc, "field", None)
            answer = {"error": {"message": str(exc), "hint": hint, "field": of}}
        except MemoryError:
            what = f"what was played needs more than {MAX_MEMORY_BYTES // MB} MB"
            hint = "save it, and load the page again"
            answer = {"error": {"message": what, "hint": hint, "field": None}}
        text = encoded(answer)
        sys.stdout.buffer.write(b"%d\n%b" % (len(text), text))
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
