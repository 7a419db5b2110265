# SPDX-License-Identifier: Apache-2.0
"""`protocol`: what a client sends, and what has to come back.

    HTTP pages ─▶ reset ─▶ steps ─▶ state ─▶ reset again ─▶ invalid messages ─▶ close

The frames are our server's, and correct; tested is the content that the environment gives them, and
whether it survives an episode. If a project's own server answers (`--set serve-as-is=yes`), the
frames are tested as well.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....environments.access import ask
from ....schema.errors import NotAnswering
from ....system.text.json_lines import Json
from ....system.text.units import plural
from .subject import ASK_SECONDS, CheckResult, Finding, Frame, SessionFailed, Subject, TrialSession

NO_ACTION = {"openenv_test": {"no": "action"}}
LOG = "with --keep it stays running, and its log has the traceback of an error"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_BESIDE = frozenset({"reward", "done", "metadata"})  # of an observation, but not within it
_INVALID = (
    ("an action that it does not know", {"type": "step", "data": NO_ACTION}),
    ("a message of an unknown type", {"type": "openenv_test"}),
    ("text that is not JSON", "{"),
)


async def check(subject: Subject, result: CheckResult) -> None:
    """Play one session and look at each answer."""
    result.findings += await asyncio.to_thread(_pages, subject)
    async with subject.session() as session:
        play = _Play(subject, session, result)
        await play.episode()
        await play.state_and_reset()
        await play.invalid()
        if not await session.end():
            play.fault(
                "the server does not close the connection after a `close` message",
                "clients wait for it until their time-out",
                "close() of the environment must return; see what it waits for",
            )
    answered = result.figures["steps"] - result.figures["refused_steps"]
    result.summary = (
        f"{plural(answered, 'step')} with {subject.actions.origin}, state, reset, errors, close"
    )


def _pages(subject: Subject) -> Iterator[Finding]:
    for path, has in (("/health", "status"), ("/metadata", "name"), ("/schema", "action")):
        try:
            answer = ask(subject.base_url, path, ASK_SECONDS)
            problem = None if has in answer else f"{path} does not say its {has!r}"
        except (NotAnswering, TypeError) as exc:
            problem = str(exc)
        if problem is not None:
            means = "clients and dashboards that ask for it do without, or fail"
            yield Finding(problem, means, "answer it as OpenEnv's server does")


class _Play:
    """One session's way through the protocol."""

    def __init__(self, subject: Subject, session: TrialSession, result: CheckResult) -> None:
        self._subject = subject
        self._session = session
        self._result = result
        self._player = subject.actions.player(subject.plan.seed)
        self._steps_since_reset = 0
        self._refused: Counter[tuple[str, str | None]] = Counter()  # by error and its remedy

    def fault(self, found: str, means: str, remedy: str, *, is_failure: bool = True) -> None:
        """Add a finding, once."""
        finding = Finding(found, means, remedy, is_failure)
        if finding not in self._result.findings:
            self._result.findings.append(finding)

    async def episode(self) -> None:
        """Reset, and take steps."""
        await self._reset("a reset", seed=self._subject.plan.seed)
        steps = max(1, self._subject.plan.steps)
        for _ in range(steps):
            if await self._step():
                await self._reset("a reset after the end of an episode")
        refused = self._refused.total()
        self._result.figures |= {"steps": steps, "refused_steps": refused}
        if not refused:
            return
        (most, remedy), count = self._refused.most_common(1)[0]
        means = (
            "an error is no observation: an agent that errs does not learn from it, and many "
            "clients end the episode"
        )
        self.fault(
            f"{refused} of {plural(steps, 'step')} with {self._subject.actions.origin} got an "
            f"error, {count} of them: {most}",
            means if refused < steps else "no step was tested",
            remedy
            or "say with --action which actions to play, or answer what cannot be done by an "
            f"observation; {LOG}",
            is_failure=refused == steps,
        )

    async def state_and_reset(self) -> None:
        """Ask for the state, before and after another reset."""
        state = await self._session.state()
        if state.kind != "state":
            self.fault(
                f"state is answered by an error: {state.error}",
                "clients that look at the state, such as training code's loggers, fail",
                "let `state` return a State (a property, not a method)",
            )
            return
        counted = state.data.get("step_count")
        if counted != self._steps_since_reset and not self._refused:
            steps = plural(self._steps_since_reset, "step")
            self.fault(
                f"after {steps} the state's step_count is {counted}",
                "readers of step_count see an episode as shorter or longer than it is",
                "add 1 to the state's step_count in each step, and set it to 0 in reset",
                is_failure=False,
            )
        await self._reset("a second reset", seed=self._subject.plan.seed + 1)
        counted = (await self._session.state()).data.get("step_count")
        if counted:
            self.fault(
                f"after a reset the state's step_count is {counted}, and not 0",
                "a second episode in one session is not a new one",
                "make a new State in reset",
            )

    async def invalid(self) -> None:
        """Send invalid messages: each must get an error, and the session must continue."""
        for what, message in _INVALID:
            answer = await self._session.ask(message)
            if answer.kind != "error" and what != _INVALID[0][0]:  # an action may be anything
                self.fault(
                    f"{what} is answered by {answer.kind!r}",
                    "a client that is wrong does not learn of it",
                    "answer an error frame with a code, as OpenEnv's server does",
                )
            await self._reset(f"a reset after {what}")

    async def _reset(self, what: str, **arguments: Any) -> None:
        frame = await self._session.reset(**arguments)
        self._steps_since_reset = 0
        if frame.kind != "observation":
            text = f"{what} is answered by {frame.error or frame.kind}"
            raise SessionFailed(text, frame.data.get("hint"))
        self._look(what, frame)
        if frame.data.get("done"):
            self.fault(
                f"{what} answers an episode that is over (done)",
                "clients end the episode at once, without a step",
                "answer done=False from reset",
                is_failure=False,
            )

    async def _step(self) -> bool:
        """Take a step; return whether it was the episode's last."""
        frame = await self._session.step(self._player())
        self._steps_since_reset += 1
        if frame.kind == "error":
            self._refused[str(frame.error), frame.data.get("hint")] += 1
            self._steps_since_reset -= 1
            return False
        self._look("a step", frame)
        return bool(frame.data.get("done"))

    def _look(self, what: str, frame: Frame) -> None:
        data = frame.data
        if not isinstance(data.get("observation"), dict):
            self.fault(
                f"{what} answers no observation ({frame.kind} with {sorted(data)})",
                "no client can read it",
                "return an Observation",
            )
            return
        reward = data.get("reward")
        is_number = isinstance(reward, bool | int | float) and math.isfinite(reward)
        if reward is not None and not is_number:
            self.fault(
                f"the reward of {what} is {reward!r}",
                "training code cannot add it up, and NaN spoils each mean it is part of",
                "return a finite number, or None",
            )
        for wrong in differences(data["observation"], self._subject.schemas.get("observation")):
            self.fault(
                f"the observation of {what} is not what /schema says: {wrong}",
                "a typed client refuses it: it makes an observation of the declared class",
                "return the class that create_app was given (or the Environment's type argument)",
            )


def differences(value: Json, schema: Json | None) -> Iterator[str]:
    """Return where the fields of an observation differ from its schema's, one level deep."""
    properties = (schema or {}).get("properties")
    if not properties or schema is None:
        return
    for name in sorted(set(schema.get("required") or ()) - set(value) - _BESIDE):
        yield f"{name} is missing"
    for name, item in value.items():
        if name not in properties:
            if schema.get("additionalProperties") is False:
                yield f"{name} is not in it"
        elif not _fits(item, properties[name]):
            yield f"{name} is {type(item).__name__}, and not {properties[name].get('type')}"


def _fits(value: Any, schema: Json) -> bool:
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:  # a union, a reference
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
