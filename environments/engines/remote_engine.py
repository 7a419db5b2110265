# SPDX-License-Identifier: Apache-2.0
"""An engine that runs on another machine, for an agent that has a channel there: both ends.

    agent: RemoteEngine ──{"id", "op", …} a line──▶ stdin   EngineServer ──▶ the engine itself
                        ◀──{"id", "item" …}, …────  stdout    a thread for each question

`{"id", "item"}` is a piece of an answer, `{"id", "end": true}` its end, `{"id", "error": {kind,
message, hint}}` what the engine raised instead. The first line says who is there: `HELLO`, with the
version, which must be the agent's own. What a shell prints before that is skipped.

Nothing that matters is kept there (`base.py` demands that of every engine), so the channel may
break at any time: what was asked fails with `EngineGone`, the other end sees the end of its input
and ends, and the next channel finds everything again. Times are converted: boots differ.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import IO, Any, Protocol, runtime_checkable

from ... import __version__
from ...processes.exits.exit_reason import Detector
from ...system.json_lines import Json, decode_line, encode_line
from ...system.process_identity import boot_seconds
from .base import (
    Capacity,
    Check,
    Engine,
    EngineError,
    EngineGone,
    EngineRefused,
    ExitFacts,
    Instance,
    InstanceState,
    Labels,
    LogChunk,
    NameTaken,
    ReplicaPlan,
)

HELLO = "openenvd-engine"
HELLO_SECONDS = 30.0  # for Python to start there
ANSWER_SECONDS = 300.0  # for an answer: the engine there waits for its own commands, a minute each
_KINDS: dict[str, type[EngineError]] = {
    each.__name__: each for each in (EngineGone, EngineRefused, NameTaken)
}


def hello() -> Json:
    """Return the first line of the other end."""
    return {HELLO: __version__, "boot_seconds": boot_seconds()}


def await_hello(
    process: subprocess.Popen[bytes], host: str, failure: Callable[[], Exception]
) -> Json:
    """Return the first line of the other end; raises what `failure` returns if none comes.

    Raises:
        EngineGone: It is of another version.
    """
    too_late = threading.Timer(HELLO_SECONDS, process.kill)
    too_late.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                found = decode_line(line)
                if HELLO in found:
                    break
        else:
            process.wait()
            raise failure()
    finally:
        too_late.cancel()
    if found[HELLO] != __version__:
        text = f"the host {host} has openenvd {found[HELLO]}, and this is {__version__}"
        raise EngineGone(text, f"there: pip install . in a clone of openenvd {__version__}")
    return found


class EngineChannel:
    """One process that runs an engine elsewhere, and what is asked of it."""

    def __init__(
        self, command: Sequence[str], host: str, failure: Callable[[int, IO[bytes]], EngineGone]
    ) -> None:
        """Start it, and wait until it answers.

        Args:
            command: Runs an `EngineServer`.
            host: Where, for messages.
            failure: Makes the error of its exit code, and of what it has printed.

        Raises:
            EngineGone
        """
        self._told = tempfile.TemporaryFile()  # noqa: SIM115  for as long as it is open
        self._host = host
        self._failure = failure
        self._lock = threading.Lock()
        self._answers: dict[int, queue.Queue[Json | None]] = {}
        self._ids = itertools.count(1)
        self._end: EngineGone | None = None  # why it has ended
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._told,
            start_new_session=True,
        )
        try:
            found = await_hello(self._process, host, self._note_end)
        except BaseException:
            self._note_end()
            raise
        self._ahead = boot_seconds() - float(found["boot_seconds"])
        self._reader = threading.Thread(target=self._read, name="remote engine", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """Whether anything can be asked."""
        return self._end is None

    def ask(self, op: str, **fields: Any) -> Any:
        """Return the last piece of the answer to a question; None: there was none.

        Raises:
            EngineError: As the engine does; or the channel has broken.
        """
        seconds = ANSWER_SECONDS + float(fields.get("grace_seconds", 0.0))
        pieces = list(self._pieces(op, fields, seconds))
        return pieces[-1] if pieces else None

    def stream(self, op: str, **fields: Any) -> Iterator[Any]:
        """Yield the pieces of an answer, however far apart they come; raises as `ask`."""
        return self._pieces(op, fields, None)

    def _pieces(self, op: str, fields: Json, seconds: float | None) -> Iterator[Any]:
        number, answers = next(self._ids), queue.Queue[Json | None]()
        self._answers[number] = answers
        try:
            self._send({"id": number, "op": op, **fields})
            while (answer := answers.get(timeout=seconds)) is not None:
                if "item" in answer:
                    yield answer["item"]
                elif error := answer.get("error"):
                    kind = _KINDS.get(error["kind"], EngineGone)
                    raise kind(error["message"], error["hint"])
                else:
                    return
            raise self._gone()
        except queue.Empty:
            self._process.kill()  # with all that waits for it: the next one asks by another channel
            text = f"the host {self._host} has not answered for {seconds:g} s"
            raise EngineGone(text, "is it overloaded, or a file system of it away?") from None
        finally:
            del self._answers[number]

    def instance(self, data: Json) -> Instance:
        """Return an instance of the other end, with this machine's times."""
        found = {key: data[key] for key in Instance.__dataclass_fields__ if key in data}
        for name in ("ends_at", "replace_at"):
            if found[name] is not None:
                found[name] += self._ahead
        found["labels"] = Labels(**found["labels"])
        found["state"] = InstanceState(found["state"])
        if (facts := found["exit"]) is not None:
            found["exit"] = ExitFacts(**{**facts, "detector": Detector(facts["detector"])})
        return Instance(**found)

    def close(self) -> None:
        """End it; what is asked fails."""
        self._process.kill()
        self._reader.join()

    def _send(self, message: Json) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(encode_line(message))
                self._process.stdin.flush()
        except (OSError, ValueError) as exc:
            raise self._gone() from exc

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                message = decode_line(line)
                if (answers := self._answers.get(message["id"])) is not None:
                    answers.put(message)
        self._note_end()
        for answers in list(self._answers.values()):
            answers.put(None)

    def _note_end(self) -> EngineGone:
        """Note why it has ended, or ends now; its pipes are closed."""
        if self._end is None:
            self._process.kill()
            self._end = self._failure(self._process.wait(), self._told)
            with self._lock, contextlib.suppress(OSError), self._process:
                self._told.close()
        return self._end

    def _gone(self) -> EngineGone:
        self._reader.join()
        end = self._note_end()
        return EngineGone(end.message, end.hint)


class RemoteEngine:
    """Asks an engine that runs elsewhere; who makes the channel says where."""

    def channel(self) -> EngineChannel:
        """Return the channel, which is made if there is none; raises `EngineGone`."""
        raise NotImplementedError

    def capacity(self) -> Capacity:
        """Tell what there is for replicas."""
        return Capacity(**self.channel().ask("capacity"))

    def list(self) -> Iterable[Instance]:
        """Return everything that carries our labels, without addresses."""
        channel = self.channel()
        found = channel.ask("list")
        return [replace(channel.instance(each), address=None) for each in found]

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the instance of a replica."""
        channel = self.channel()
        found = channel.ask("find", plan=plan.to_json())
        return None if found is None else channel.instance(found)

    def start(self, plan: ReplicaPlan) -> Instance:
        """Start the instance of a replica."""
        channel = self.channel()
        return channel.instance(channel.ask("start", plan=plan.to_json()))

    def changes(self) -> Iterator[None]:
        """Yield when any instance may have changed."""
        for _ in self.channel().stream("changes"):
            yield None

    def logs(self, instance: Instance, cursor: str | None) -> Iterator[LogChunk]:
        """Yield what an instance prints."""
        asked = {"instance": asdict(instance), "cursor": cursor}
        for item in self.channel().stream("logs", **asked):
            yield LogChunk(data=base64.b64decode(item["data"]), cursor=item["cursor"])

    def signal(self, instance: Instance, number: int) -> None:
        """Send a signal."""
        self.channel().ask("signal", instance=asdict(instance), number=int(number))

    def stop(self, instance: Instance, grace_seconds: float) -> None:
        """Stop an instance."""
        self.channel().ask("stop", instance=asdict(instance), grace_seconds=grace_seconds)

    def remove(self, instance: Instance) -> None:
        """Remove an instance."""
        self.channel().ask("remove", instance=asdict(instance))


@runtime_checkable
class KeepsCopies(Protocol):
    """An engine whose machine has copies of what agents elsewhere launch."""

    def keep_copies(self, home: str, digests: Iterable[str]) -> None:
        """Remove all copies of a home but those of these digests."""


class EngineServer:
    """The other end: answers the questions of one agent, until its input ends."""

    def __init__(self, engine: Engine, output: IO[bytes]) -> None:
        self._engine = engine
        self._output = output
        self._lock = threading.Lock()

    def run(self, lines: Iterable[bytes]) -> None:
        """Answer each line."""
        self._send(hello())
        for line in lines:
            thread = threading.Thread(target=self._answer, args=(decode_line(line),), daemon=True)
            thread.start()
        self._engine.close()

    def _answer(self, message: Json) -> None:
        number = message.pop("id")
        try:
            for item in self._items(message.pop("op"), message):
                self._send({"id": number, "item": item})
            self._send({"id": number, "end": True})
        except EngineError as exc:
            self._fail(number, type(exc).__name__, exc.message, exc.hint)
        except Exception as exc:
            self._fail(number, "", f"{type(exc).__name__}: {exc}", None)

    def _items(self, op: str, asked: Json) -> Iterator[Any]:
        if op == "changes":
            yield from self._engine.changes()
        elif op == "logs":
            for chunk in self._engine.logs(_instance(asked), asked["cursor"]):
                yield {"data": base64.b64encode(chunk.data).decode(), "cursor": chunk.cursor}
        else:
            yield _QUESTIONS[op](self._engine, asked)

    def _fail(self, number: int, kind: str, message: str, hint: str | None) -> None:
        self._send({"id": number, "error": {"kind": kind, "message": message, "hint": hint}})

    def _send(self, message: Json) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # it is over: as the input
            self._output.write(encode_line(message))
            self._output.flush()


def _plan(asked: Json) -> ReplicaPlan:
    return ReplicaPlan.from_json(asked["plan"])


def _instance(asked: Json) -> Instance:
    """Return the instance that is meant; how it is, the engine knows itself."""
    data = asked["instance"]
    state = InstanceState(data["state"])
    return Instance(id=data["id"], labels=Labels(**data["labels"]), state=state)


def _find(engine: Engine, asked: Json) -> Json | None:
    found = engine.find(_plan(asked))
    return None if found is None else asdict(found)


def _keep_copies(engine: Engine, asked: Json) -> None:
    if isinstance(engine, KeepsCopies):
        engine.keep_copies(asked["home"], asked["digests"])


_QUESTIONS: dict[str, Callable[[Engine, Json], Any]] = {
    "check": lambda engine, _: asdict(engine.check()),
    "capacity": lambda engine, _: asdict(engine.capacity()),
    "list": lambda engine, _: [asdict(each) for each in engine.list()],
    "find": _find,
    "start": lambda engine, asked: asdict(engine.start(_plan(asked))),
    "signal": lambda engine, asked: engine.signal(_instance(asked), asked["number"]),
    "stop": lambda engine, asked: engine.stop(_instance(asked), asked["grace_seconds"]),
    "remove": lambda engine, asked: engine.remove(_instance(asked)),
    "keep_copies": _keep_copies,
}


def read_check(data: Json) -> Check:
    """Return the `Check` of the other end."""
    return Check(**{**data, "notes": tuple(data["notes"])})


def own_output() -> IO[bytes]:
    """Return this process's output, for answers alone: what anything prints is an error's text."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def serve(engine: Engine) -> None:
    """Be the other end, at this process's own input and output; ends at once with its input."""
    EngineServer(engine, own_output()).run(sys.stdin.buffer)
    os._exit(0)  # threads may wait for the engine for ever
