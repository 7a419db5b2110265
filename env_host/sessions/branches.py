# SPDX-License-Identifier: Apache-2.0
"""`Branches`: copies of sessions, and parked copies to which a session can return.

    branch      looks at the instance ─▶ takes slots and memory, all or none ─▶ copies, on the
                thread of the session ─▶ new sessions, which wait for their clients
    checkpoint  looks, copies ─▶ a parked copy, which has no slot
    restore     copies the parked copy into the session; answers the observation of that point

All of it happens between two calls of the session. `copying.py` decides how a session is copied;
one with a process of its own is forked instead (`remote_session.py`).
What happens when

    nothing copies the session safely   BRANCH_UNSUPPORTED; the session is untouched
    there are too few slots             CAPACITY_REACHED, and no branch at all
    there is too little memory          BRANCH_MEMORY, and no branch at all
    a copy fails, or the client leaves  the branches made so far end, their slots are free
    a forked copy fails as it starts    its client is answered with the end of its process
    no client attaches to a branch      it ends after its `ttl_s`
    the client of a branch leaves       it ends as any session
    the parent ends                     its branches continue; its checkpoints are dropped
    there are too many checkpoints      the oldest is dropped; CHECKPOINT_UNKNOWN says so later
    a checkpoint is old                 it is dropped, as above
    the shard ends                      its sessions, branches and checkpoints end with it
    the process of a checkpoint ends    CHECKPOINT_UNKNOWN says how
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...system.memory.cgroup_tree import free_memory_bytes
from ...system.text.units import MB
from ..environment.instances import Calls
from ..errors import BranchRefused, SessionEnded, UnknownSession, WSErrorCode
from . import copying
from .copying import Reason, Tier, unsupported
from .remote_session import ProcessEnd, RemoteSession

if TYPE_CHECKING:
    from .session import Session
    from .table import SessionTable

MAX_BRANCHES = 4096  # of one request
MAX_CHECKPOINTS = 1024  # of one process
CHECKPOINT_SECONDS = 3600.0  # from its making, or from the last return to it
MAX_SEEN_BYTES = 64 * 1024  # of an observation's message, before the first request to copy
MAX_TTL_SECONDS = 3600.0
UNCHECKED_BYTES = 4 * MB  # copies that need less are made without a look at the free memory
FORKED_BYTES = 2 * MB  # that a forked copy is expected to need for itself
MAX_REMEMBERED = 4096  # dropped checkpoints

NOTHING_SEEN = b'{"type":"observation","data":{"observation":{},"reward":null,"done":false}}'

_T = TypeVar("_T")


class BranchRequest(BaseModel):
    """The data of a `branch` message."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=1, ge=1, le=MAX_BRANCHES)
    rng: Literal["same", "fresh"] = "same"
    seeds: list[int] | None = None
    ttl_s: float = Field(default=60.0, gt=0, le=MAX_TTL_SECONDS)

    @model_validator(mode="after")
    def _has_a_seed_for_each(self) -> Self:
        if self.seeds is not None and len(self.seeds) != self.count:
            raise ValueError(f"{len(self.seeds)} seeds for {self.count} branches")
        return self

    def seed_of(self, number: int) -> int | None:
        """Return the seed of one branch; None: its random numbers continue as the parent's."""
        if self.seeds is not None:
            return self.seeds[number]
        return None if self.rng == "same" else secrets.randbits(32)


class RestoreRequest(BaseModel):
    """The data of a `restore` message."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A parked copy of a session."""

    session_id: str  # of the session that it was made of
    tier: Tier
    copy: Any  # an instance, the state that one has exported, or a `ProcessEnd`
    seen: bytes
    may_step: bool | None
    made_at: float  # on the loop's clock


class Checkpoints:
    """The checkpoints of one process, the oldest first. No I/O."""

    def __init__(self) -> None:
        self._by_id: dict[str, Checkpoint] = {}
        self._dropped: deque[str] = deque(maxlen=MAX_REMEMBERED)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, checkpoint: Checkpoint) -> str:
        """Keep a checkpoint and return its id; too old ones are dropped, and the oldest of many."""
        checkpoint_id = secrets.token_hex(16)
        self._by_id[checkpoint_id] = checkpoint
        self._drop_old(checkpoint.made_at)
        return checkpoint_id

    def find(self, checkpoint_id: str, now: float) -> Checkpoint:
        """Return a checkpoint; raises `BranchRefused` with the reason why there is none."""
        self._drop_old(now)
        found = self._by_id.get(checkpoint_id)
        if found is not None:
            return found
        text = "No checkpoint has this id here; it ends with the session that made it."
        if checkpoint_id in self._dropped:
            text = (
                f"This checkpoint was dropped: the last {MAX_CHECKPOINTS} are kept, each for "
                f"{CHECKPOINT_SECONDS:g} s."
            )
        text += " Reset, and take the same actions again."
        raise BranchRefused(text, WSErrorCode.CHECKPOINT_UNKNOWN)

    def drop_of(self, session_id: str) -> None:
        """Drop the checkpoints of a session that has ended."""
        if self._by_id:
            for checkpoint_id, each in list(self._by_id.items()):
                if each.session_id == session_id:
                    self._discard(checkpoint_id)

    def _drop_old(self, now: float) -> None:
        for checkpoint_id, each in list(self._by_id.items()):
            if len(self) <= MAX_CHECKPOINTS and now - each.made_at <= CHECKPOINT_SECONDS:
                return
            self._discard(checkpoint_id)
            self._dropped.append(checkpoint_id)

    def _discard(self, checkpoint_id: str) -> None:
        parked = self._by_id.pop(checkpoint_id).copy
        if isinstance(parked, ProcessEnd):
            parked.discard()


def check_memory(size_bytes: int, count: int, free_bytes: int | None) -> None:
    """Raise `BranchRefused` if copies of this size do not fit into the free memory."""
    if free_bytes is not None and size_bytes * count > free_bytes:
        text = (
            f"{count} copies of this session need about {size_bytes * count / MB:.0f} MB, and "
            f"{free_bytes / MB:.0f} MB are free."
        )
        raise BranchRefused(text, WSErrorCode.BRANCH_MEMORY)


class Branches:
    """Makes branches and checkpoints of the sessions of one process. On the event loop only."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self._loop = asyncio.get_running_loop()
        self.checkpoints = Checkpoints()
        self.live = 0  # branches
        self.is_used = False  # a branch or a checkpoint was requested

    def note_seen(self, session: Session, frame: bytes) -> None:
        """Keep the message of an observation, for `restore`; a large one only where it may come."""
        session.seen = frame if self.is_used or len(frame) <= MAX_SEEN_BYTES else b""

    def session_ended(self, session: Session) -> None:
        """Drop the checkpoints of a session."""
        self.checkpoints.drop_of(session.id)
        self.live -= session.is_branch

    async def answer(self, session: Session, kind: str, data: dict[str, Any]) -> Any:
        """Answer a request: with a message as plain data, or with that of an observation, written.

        Raises:
            pydantic.ValidationError: the request's data is invalid.
            BranchRefused: it cannot be done; the session is untouched.
        """
        session.check_ready()
        self.is_used = True
        if kind == "branch":
            count = {"count": len(seeds)} if isinstance(seeds := data.get("seeds"), list) else {}
            request = BranchRequest.model_validate(count | data)
            tier, made = await self._branch(session, request)
            ids = [{"session_id": each.id} for each in made]
            return {"type": "branches", "data": {"by": tier, "branches": ids}}
        if kind == "checkpoint":
            tier, checkpoint_id = await self._checkpoint(session)
            return {"type": kind, "data": {"checkpoint_id": checkpoint_id, "by": tier}}
        return await self._restore(session, RestoreRequest.model_validate(data).checkpoint_id)

    async def _branch(self, parent: Session, request: BranchRequest) -> tuple[Tier, list[Session]]:
        tier = await self._look_at(parent, request.count)
        made = self._table.begin_branches(request.count)
        for each in made:
            each.is_branch = True
        self.live += len(made)
        try:
            copies = await _copies(parent, tier, len(made))
            for each, copy in zip(made, copies, strict=True):
                await _continue(each, tier, copy)
            for number, each in enumerate(made):
                if (seed := request.seed_of(number)) is not None:
                    await _reseed(each, seed)
        except BaseException:
            for each in made:
                self._table.release(each)
            raise
        for each in made:
            each.seen, each.may_step = parent.seen, parent.may_step
            each.close_when_detached = True
            each.expiry = self._loop.call_later(request.ttl_s, self._expire, each)
        return tier, made

    def _expire(self, branch: Session) -> None:
        if branch.socket is None:
            self._table.release(branch)

    async def _look_at(self, session: Session, count: int) -> Tier:
        """Return how copies of a session can be made; raises `BranchRefused`: they cannot."""
        definition = self._table.definition
        if getattr(definition.env_class, "SHARED_STATE", False):
            raise unsupported(Reason.SHARED_STATE, ["the sessions of this class share one state"])
        if isinstance(session, RemoteSession):
            check_memory(FORKED_BYTES, count, free_memory_bytes())
            return Tier.FORK  # its process says whether it can be forked
        if self._table.exclusive:
            text = "the class does not set SUPPORTS_CONCURRENT_SESSIONS = True"
            raise unsupported(Reason.SHARED_STATE, [text])
        tier, size_bytes = await _on_thread(session, _look, session.env)
        if size_bytes * count > UNCHECKED_BYTES:
            check_memory(size_bytes, count, free_memory_bytes())
        return tier

    async def _checkpoint(self, session: Session) -> tuple[Tier, str]:
        tier = await self._look_at(session, 1)
        [parked] = await _copies(session, tier, 1)
        now, seen = self._loop.time(), session.seen or NOTHING_SEEN
        if session.id not in self._table and isinstance(parked, ProcessEnd):
            parked.discard()
            raise UnknownSession(f"Session {session.id} has ended")
        made = Checkpoint(session.id, tier, parked, seen, session.may_step, now)
        return tier, self.checkpoints.add(made)

    async def _restore(self, session: Session, checkpoint_id: str) -> bytes:
        found = self.checkpoints.find(checkpoint_id, self._loop.time())
        copy = found.copy
        if isinstance(session, RemoteSession):
            try:
                [copy] = await copy.copies(1)
            except SessionEnded as exc:
                text = f"The checkpoint is lost: {exc} Reset, and take the same actions again."
                raise BranchRefused(text, WSErrorCode.CHECKPOINT_UNKNOWN) from exc
            if session.id not in self._table:  # it has ended meanwhile
                copy.discard()
                raise UnknownSession(f"Session {session.id} has ended")
        elif found.tier is Tier.COPY:
            [copy] = await _on_thread(session, copying.copies_of, copy, 1)
        await _continue(session, found.tier, copy)
        session.seen, session.may_step = found.seen, found.may_step
        return found.seen


async def _on_thread(session: Session, call: Callable[..., _T], *args: Any) -> _T:
    """Call a function where the synchronous calls of a session run, or here if it has none."""
    if Calls(session.env).signature.is_async:
        return call(*args)
    result: _T = await session.call(call, False, *args)
    return result


def _look(env: Any) -> tuple[Tier, int]:
    """Return how an instance can be copied, and the bytes of a copy."""
    contents = copying.examine(env)
    return copying.choose_tier(env, contents), contents.size_bytes


async def _copies(session: Session, tier: Tier, count: int) -> list[Any]:
    """Return copies of a session: processes, instances, or the state that it has exported."""
    if isinstance(session, RemoteSession):
        return list(await session.thread.copies(count))
    if tier is Tier.COPY:
        return await _on_thread(session, copying.copies_of, session.env, count)
    return [await _on_thread(session, copying.export_state, session.env)] * count


async def _continue(session: Session, tier: Tier, copy: Any) -> None:
    """Give a session, which may be a new one, the state that a copy has."""
    if isinstance(session, RemoteSession):
        session.continue_in(copy)
    elif tier is Tier.COPY:
        await session.replace(copy)
    else:
        if not session.is_ready:
            await session.begin()
        await _on_thread(session, copying.import_state, session.env, copy)


async def _reseed(session: Session, seed: int) -> None:
    if isinstance(session, RemoteSession):
        try:
            failed = await session.ask("seed", seed)
        except SessionEnded as exc:
            failed = {"text": str(exc)}
        if failed is not None:
            text = f"A branch could not be seeded: {failed['text']}"
            raise BranchRefused(text, WSErrorCode.BRANCH_MEMORY)
    else:
        generators = copying.examine(session.env).generators
        await _on_thread(session, copying.reseed, generators, seed)
