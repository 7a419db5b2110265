# SPDX-License-Identifier: Apache-2.0
"""Runs the load generators of one measurement: starts, synchronises, reads and stops them.

    Crew ──one pipe each──▶ generator 0..n-1 ──thousands of sockets──▶ server

One thread, one selector: the crew only waits while a batch runs, so that it takes no CPU from
the server under test. A generator exits when its stdin ends, so none outlives its crew.
"""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Self

import orjson

from ..system.units import MB
from .errors import GeneratorLost
from .generator import Batch

Json = dict[str, Any]

START_SECONDS = 180.0  # for a generator to import what it needs; upstream's client: 8 s of CPU
HEAD_START_SECONDS = 0.05  # from `go` to the first connection: everybody has read it by then
MARGIN_SECONDS = 30.0  # beyond a batch's own time-out, for outcomes to be reported
END_SECONDS = 5.0
PORTS_OF_AN_ADDRESS = 20_000  # of one source address towards one server, with room to spare
_READ_BYTES = MB

OnTick = Callable[[int], None]  # sessions that have ended so far


@dataclass(slots=True)
class Harvest:
    """The results of one batch, from all generators."""

    outcomes: list[Json]
    wall_seconds: float
    cpu_seconds: list[float]  # of each generator
    worst_lag_seconds: float
    port_retries: int


class Crew:
    """A set of generators; a context manager that stops them all.

    Args:
        program: what is started, if not our own generator: it reads and writes the same lines.
    """

    def __init__(self, size: int, program: Sequence[str] = ()) -> None:
        self._size = size
        self._program = program or (sys.executable, "-P", "-m", f"{__package__}.generator")
        self._members: list[_Member] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        try:
            for number in range(self._size):
                member = _Member(number, self._program)
                self._members.append(member)
                self._selector.register(member.output, selectors.EVENT_READ, member)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End them all; twice is fine."""
        for member in self._members:
            member.end()
        self._members.clear()
        self._selector.close()

    def run(
        self,
        batch: Batch,
        *,
        on_tick: OnTick = lambda _: None,
        on_held: Callable[[], None] | None = None,
    ) -> Harvest:
        """One batch, shared out; `on_held` is called while all sessions are open and reset."""
        shares = shares_of(batch, len(self._members))
        for member, share in zip(self._members, shares, strict=True):
            member.begin(share)
        self._until(lambda m: m.is_prepared, START_SECONDS, lambda _: None)
        started_at = time.monotonic() + HEAD_START_SECONDS
        for member in self._members:
            member.tell({"go": started_at})
        patience = batch.timeout_seconds + MARGIN_SECONDS
        if on_held is not None:
            self._until(lambda m: m.is_held, patience, on_tick)
            on_held()
            for member in self._members:
                member.tell({"release": True})
        self._until(lambda m: m.done is not None, patience, on_tick)
        reports = [member.done for member in self._members if member.done]
        return Harvest(
            outcomes=[outcome for report in reports for outcome in report["outcomes"]],
            wall_seconds=max(report["wall_seconds"] for report in reports),
            cpu_seconds=[report["cpu_seconds"] for report in reports],
            worst_lag_seconds=max(report["worst_lag_seconds"] for report in reports),
            port_retries=sum(report["port_retries"] for report in reports),
        )

    def _until(self, is_there: Callable[[_Member], bool], seconds: float, on_tick: OnTick) -> None:
        deadline = time.monotonic() + seconds
        while not all(map(is_there, self._members)):
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise GeneratorLost(f"a load generator has sent nothing for {seconds:.0f} s")
            for key, _ in ready:
                key.data.read()
            on_tick(sum(member.ended for member in self._members))


class _Member:
    """The crew's side of one generator."""

    def __init__(self, number: int, program: Sequence[str]) -> None:
        self.number = number
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._unread = bytearray()
        self._forget()

    @property
    def output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def is_held(self) -> bool:
        """Every session of it has been reset, or has failed."""
        return self.done is not None or self.held + self.ended >= self._count

    def begin(self, batch: Batch) -> None:
        self._forget()
        self._count = batch.count
        self.tell({"batch": asdict(batch)})

    def tell(self, message: Json) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(orjson.dumps(message) + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise self._lost() from exc

    def read(self) -> None:
        """What it has said; at least something has come."""
        data = self.output.raw.read(_READ_BYTES)  # type: ignore[attr-defined]
        if not data:
            raise self._lost()
        self._unread += data
        if b"\n" in data:
            *lines, rest = bytes(self._unread).split(b"\n")
            self._unread = bytearray(rest)
            for line in lines:
                self._hear(orjson.loads(line))

    def end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _forget(self) -> None:
        self.is_prepared = False
        self.done: Json | None = None
        self.ended = self.held = self._count = 0

    def _hear(self, message: Json) -> None:
        self.is_prepared = self.is_prepared or "prepared" in message
        self.done = message.get("done")
        self.ended = message.get("ended", self.ended)
        self.held = message.get("held", self.held)

    def _lost(self) -> GeneratorLost:
        self._process.kill()
        code = self._process.wait()
        return GeneratorLost(
            f"generator {self.number} ended with exit code {code}",
            "the end of its output is in the log; too little memory is the usual cause",
        )


def shares_of(batch: Batch, members: int) -> list[Batch]:
    """The batch, shared out as evenly as it goes; each share with its own source addresses.

    Shares take the server's addresses in turn.
    """
    addresses = ((batch.host, batch.port), *batch.others)
    counts = [batch.count // members + (n < batch.count % members) for n in range(members)]
    window = max(1, batch.window // members) if batch.window else 0
    shares = []
    for number, count in enumerate(counts):
        host, port = addresses[number % len(addresses)]
        sources = sources_of(host, number, count)
        share = replace(batch, host=host, port=port, others=(), count=count, window=window)
        shares.append(replace(share, sources=sources))
    return shares


def sources_of(host: str, number: int, count: int) -> tuple[str, ...]:
    """List the addresses that generator `number` connects from.

    One address has some 28,000 ports towards a server, and a used port stays in TIME_WAIT for a
    minute: on loopback there are addresses enough.
    """
    if not host.startswith("127.") or sys.platform != "linux":
        return ()
    addresses = 4 + count // PORTS_OF_AN_ADDRESS
    return tuple(f"127.0.{number + 1}.{last + 1}" for last in range(addresses))
