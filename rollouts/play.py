# SPDX-License-Identifier: Apache-2.0
"""Episodes that are played by hand; also a program that plays for a page of the dashboard.

    page ──POST──▶ daemon ──a line of JSON──▶ `python -m openenvd.rollouts.play` ──session──▶ server
                          ◀─ length, answer ─┘

Each page that plays has a process of its own, because large observations would block the daemon's
interpreter lock and stay in its memory. The process ends with its input, and after `IDLE_SECONDS`
without a call, so that a closed page does not keep a session.

A call is a JSON object:
    begin       `address` (with its token), `environment`, `source`: opens the session; the answer
                has the fields of an action (`properties`, `required`)
    reset       `data`, its arguments         the answer to reset, step and random: observation,
    step        `data`, the action            images apart as in `rollouts.replay`, reward, done,
    random                                    action
    state       the environment's state
    save        `path`: see `Played.save`
The answer to a call that failed is `{"error": {"message", "hint", "field"}}`.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ..system.process.proc import set_oom_score_adj
from ..system.text.json_lines import Json
from ..system.text.units import MB
from .episodes import Episode, EpisodeStatus, Step, episode_id
from .errors import RolloutError
from .images import take_images
from .policies.random_policy import action_schema, properties, sample
from .replay import MAX_MEMORY_BYTES, OOM_SCORE_ADJ, encoded, image_views, text_view
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


@dataclass
class Played:
    """A played episode: the arguments of its reset, and each action with its answer.

    An answer has `observation`, `reward` and `done`.
    """

    reset: Json
    first: Json
    steps: list[tuple[Json, Json]] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)

    def save(self, path: Path, environment: str, source: str) -> None:
        """Save it: `NAME.py` as a pytest, any other path as an episode of a folder of rollouts.

        Raises:
            OSError: The file exists, or cannot be written.
            RolloutError: The folder cannot be written.
        """
        if path.suffix == ".py":
            self._save_test(path, source)
        else:
            run_on_thread(self._save_episode(path, environment))

    def _save_test(self, path: Path, source: str) -> None:
        """Write a test for the pytest plug-in that repeats the episode and expects its answers."""
        steps = [{"action": action, "answer": answer} for action, answer in self.steps]
        episode = {"reset": self.reset, "first": self.first["observation"], "steps": steps}
        text = json.dumps(episode, indent=1)  # JSON never contains three quotes in a row
        with path.open("x") as file:
            file.write(_PYTEST.format(source=source, episode=text))

    async def _save_episode(self, folder: Path, environment: str) -> None:
        from .folder.writer import RolloutWriter

        last, steps = self.first, list[Step]()
        for action, answer in self.steps:
            steps.append(Step.of(last["observation"], action, answer["reward"], answer["done"]))
            last = answer
        async with await RolloutWriter.open(folder) as writer:
            episode = Episode(
                id=episode_id(len(writer.finished_episode_ids())),
                environment=environment,
                seed=self.reset.get("seed"),
                steps=tuple(steps),
                total_reward=sum(step.reward or 0.0 for step in steps),
                status=EpisodeStatus.DONE if last["done"] else EpisodeStatus.TRUNCATED,
                started_at=self.started_at,
                finished_at=time.time(),
                final_observation_json=json.dumps(last["observation"]).encode(),
            )
            await writer.put(episode)


class CallFailed(Exception):
    """The environment refused a call, or raised; `field` is the action's that is wrong."""

    def __init__(self, message: str, hint: str | None = None, of: str | None = None) -> None:
        super().__init__(message)
        self.hint, self.field = hint, of


class Player:
    """Answers the calls of one page."""

    _address = _environment = _source = ""
    _schema: Json
    _session: Session | None = None
    _played: Played | None = None
    _random = Random()  # noqa: S311  an action is no secret

    def answer_to(self, call: Json) -> Json:
        """Carry out a call, and return its answer.

        Raises:
            CallFailed, RolloutError, SessionFailed, OSError, ValueError: It failed.
        """
        match call["call"]:
            case "begin":
                return self._begin(**call["data"])
            case "reset":
                if self._session is None or not self._session.is_open:  # its server was replaced
                    self._session = self._open()
                self._played = Played(call["data"], self._ask("reset", call["data"]))
                return _view(self._played.first)
            case "step":
                return self._step(call["data"])
            case "random":
                return self._step(sample(self._schema, self._random))
            case "state":
                return {"state": text_view(self._ask("state"))}
            case _:
                return self._save(**call["data"])

    def _begin(self, address: str, environment: str, source: str) -> Json:
        self._address, self._environment, self._source = address, environment, source
        self._schema = action_schema(address)
        self._session = self._open()
        return {
            "properties": properties(self._schema),
            "required": self._schema.get("required", []),
        }

    def _open(self) -> Session:
        return loop_thread().call(Session.open(self._address, ping_seconds=PING_SECONDS))

    def _step(self, action: Json) -> Json:
        answer = self._ask("step", action)
        if self._played is not None:
            self._played.steps.append((action, answer))
        return {**_view(answer), "action": text_view(action)}

    def _save(self, path: str) -> Json:
        if self._played is None:
            raise CallFailed("nothing was played: an episode begins with a reset")
        self._played.save(Path(path).expanduser(), self._environment, self._source)
        return {"steps": len(self._played.steps)}

    def _ask(self, kind: str, data: Json | None = None) -> Any:
        assert self._session is not None
        message = json.dumps({"type": kind} | ({} if data is None else {"data": data}))
        text = loop_thread().call(self._session.ask(message, ANSWER_SECONDS, kind))
        answer = json.loads(text)
        found: Json = answer.get("data") or {}
        if answer.get("type") == "error":
            raise _refused(found, self._environment)
        if kind == "state":
            return found
        observed = {"reward": found.get("reward"), "done": bool(found.get("done"))}
        return {"observation": found.get("observation"), **observed}


def _refused(error: Json, environment: str) -> CallFailed:
    """Return the error for an answer that is one, with the exception's class and place."""
    errors = error.get("errors") or []
    if errors:
        first = errors[0]
        return CallFailed(first["msg"], None, str((first["loc"] or [""])[0]))
    message, hint, place = error_text(error.get("message"), None), error.get("hint"), ""
    if error.get("place"):
        place, hint = f" ({error['place']})", hint or f"openenv logs {environment}"
    name = f"{error['exception']}: " if error.get("exception") else ""
    return CallFailed(f"{name}{message}{place}", hint)


def _view(answer: Json) -> Json:
    rest, images = take_images(answer["observation"])
    return {**answer, "observation": text_view(rest), "images": image_views(images)}


def main() -> int:
    """Answer calls until there are no more."""
    set_oom_score_adj(os.getpid(), OOM_SCORE_ADJ)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    player = Player()
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0] and (line := sys.stdin.readline()):
        try:
            answer = player.answer_to(json.loads(line))
        except (CallFailed, RolloutError, SessionFailed, OSError, ValueError) as exc:
            hint, of = getattr(exc, "hint", None), getattr(exc, "field", None)
            answer = {"error": {"message": str(exc), "hint": hint, "field": of}}
        except MemoryError:
            what = f"what was played needs more than {MAX_MEMORY_BYTES // MB} MB"
            answer = {"error": {"message": what, "hint": "save it, and reset", "field": None}}
        text = encoded(answer)
        sys.stdout.buffer.write(b"%d\n%b" % (len(text), text))
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
