# SPDX-License-Identifier: Apache-2.0
"""The brigade as an environment: an action has a packet of a voice, an observation has the mix.

    client ─/ws─▶ shard: decode ─PCM─▶ state process: add, read ─PCM─▶ shard: encode ─▶ client

Positions are samples of the brigade's clock, which is the `clock` of each observation. Stay `delay`
samples behind it: read the mix there, and send your voice with the position of the mix you sang to.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Literal
from uuid import uuid4

from pydantic import ConfigDict, Field

from ...environment.interfaces import Action, Environment, Observation, State
from ...shared_state.connection import StateProxy
from .mixing import Brigade
from .opus import FRAME_SAMPLES, Decoder, Encoder, NotOpus, pack, unpack


class BrigadeAction(Action):
    """A packet of a singer's voice, a command of the leader, or both."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"read_at": 0, "frames": 1}]})

    audio: str = Field(default="", description="Opus frames of 60 ms, packed, in base64")
    write_at: int | None = Field(default=None, description="The position of the audio's beginning")
    read_at: int | None = Field(default=None, description="From which position the mix is wanted")
    frames: int = Field(default=10, ge=1, le=255, description="How many, when there is no audio")
    order: Literal["lead", "start", "stop"] | None = Field(
        default=None, description="Take the lead, begin the song, end it"
    )


class BrigadeObservation(Observation):
    """The mix of everybody ahead, and where the song stands."""

    audio: str = Field(default="", description="The mix: Opus frames of 60 ms, packed, in base64")
    read_at: int | None = Field(default=None, description="The position of its beginning")
    heard: int = Field(default=0, description="The most singers at once in the mix")
    written: bool = Field(default=False, description="Whether the audio of the action was added")
    clock: int = Field(default=0, description="The brigade's clock: samples since it began")
    delay: int = Field(default=0, description="How far behind the clock this singer should be")
    singers: int = Field(default=0, description="Number of singers")
    leads: bool = Field(default=False, description="Whether this singer leads")
    has_leader: bool = Field(default=False, description="Whether any singer leads")
    song_start: int | None = Field(default=None, description="The position where the song began")
    song_end: int | None = Field(default=None, description="The position where it ended")


class BrigadeEnvironment(Environment[BrigadeAction, BrigadeObservation, State]):
    """One singer. All singers share a `Brigade`, wherever they are served."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    SHARED_STATE = True
    create_state = staticmethod(Brigade)
    world: StateProxy  # given by the env host, before `__init__`

    def __init__(self) -> None:
        if not hasattr(self, "world"):
            raise RuntimeError("the brigade must be served by openenvd: it has no shared state")
        self._begin(None)

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        place: int | None = None,
        **kwargs: Any,
    ) -> BrigadeObservation:
        """Join, at a place in the chain (0 to 5) or at the next one."""
        self._begin(episode_id)
        return BrigadeObservation(**await self.world.join(place=place))

    async def step_async(
        self, action: BrigadeAction, timeout_s: float | None = None, **kwargs: Any
    ) -> BrigadeObservation:
        """Execute the command, if there is one; then add the audio and read the mix."""
        facts = None if action.order is None else await self._execute(action)
        if action.read_at is None:
            return self._seen(facts or await self.world.join(), b"", action)
        pcm, frames = self._voice(action)
        world = self.world if timeout_s is None else self.world.within(timeout_s)
        facts, mixed = await world.mix(
            pcm, read_at=action.read_at, write_at=action.write_at, samples=frames * FRAME_SAMPLES
        )
        return self._seen(facts, mixed, action)

    def reset(self, *args: Any, **kwargs: Any) -> BrigadeObservation:
        """Call `reset_async` from a thread."""
        return self.world.wait_for(self.reset_async(*args, **kwargs))

    def step(self, *args: Any, **kwargs: Any) -> BrigadeObservation:
        """Call `step_async` from a thread."""
        return self.world.wait_for(self.step_async(*args, **kwargs))

    @property
    def state(self) -> State:
        """The episode's id and the number of steps taken in it."""
        return self._state

    async def _execute(self, action: BrigadeAction) -> Any:
        """Execute the leader's command, which counts from where the leader is."""
        if action.order == "lead":
            return await self.world.lead()
        if action.order == "start":
            return await self.world.start_song(at=action.read_at)
        return await self.world.stop_song(at=action.read_at)

    def _begin(self, episode_id: str | None) -> None:
        self._state = State(episode_id=episode_id or str(uuid4()))
        self._encoder = Encoder()
        self._decoder = Decoder()

    def _voice(self, action: BrigadeAction) -> tuple[bytes | None, int]:
        """The samples that were sung, and how many frames the mix shall have."""
        if not action.audio:
            return None, action.frames
        try:
            frames = unpack(base64.b64decode(action.audio, validate=True))
        except binascii.Error as exc:
            raise NotOpus(f"the audio is not base64: {exc}") from exc
        return self._decoder.decode(frames), len(frames)

    def _seen(
        self, facts: dict[str, Any], mixed: bytes, action: BrigadeAction
    ) -> BrigadeObservation:
        self._state.step_count += 1
        audio = base64.b64encode(pack(self._encoder.encode(mixed))).decode() if mixed else ""
        end = facts["song_end"]
        return BrigadeObservation(
            audio=audio,
            read_at=action.read_at,
            reward=1.0 if facts.get("written") else 0.0,
            done=end is not None and action.read_at is not None and action.read_at >= end,
            **facts,
        )
