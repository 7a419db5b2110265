# SPDX-License-Identifier: Apache-2.0
"""Runs the load generators of one measurement: starts, synchronises, reads and stops them.

    Crew ──one pipe each──▶ generator 0..n-1 ──thousands of sockets──▶ server

A thread for each generator reads what it says into one queue, on which the crew waits: while a
batch runs, the crew takes no CPU from the server under test. A generator exits when its stdin
ends, so none outlives its crew.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import orjson

from .errors import GeneratorLost
from .generator import Batch

Json = dict[str, Any]

START_SECONDS = 180.0  # for a generator to import what it needs; upstream's client: 8 s of CPU
HEAD_START_SECONDS = 0.05  # from `go` to the first connection: everybody has read it by then
MARGIN_SECONDS = 30.0  # beyond a batch's own time-out, for outcomes to be reported
END_SECONDS = 5.0
PORTS_OF_AN_ADDRESS = 20_000  # of one source address towards one server, with room to spare

OnTick = Callable[[int], None]  # sessions that have ended so far


@dataclass(slots=True)
class Harvest:
    """The results of one batch, from all generators."""

    outcomes: list[Json]
    wall_seconds: float
    cpu_seconds: list[float]  # of each generator
    worst_lag_seconds: float


class Crew:
    """A set of generators; a context manager that stops them all.

    Args:
        program: what is started, if not our own generator: it reads and writes the same lines.
    """

    def __init__(self, size: int, program: Sequence[str] = ()) -> None:
        self._size = size
        self._program = program or (sys.executable, "-P", "-m", f"{__package__}.generator")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._heard: queue.SimpleQueue[tuple[int, Json | None]] = queue.SimpleQueue()
        self._said: list[Json] = []  # by each generator, of the batch that runs

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        try:
            for number in range(self._size):
                process = subprocess.Popen(self._program, stdin=pipe, stdout=pipe)
                self._processes.append(process)
                reader = threading.Thread(
                    target=self._read, args=(number, process), name=f"generator-{number}"
                )
                reader.start()
                self._readers.append(reader)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End them all; twice is fine."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join()

    def run(
        self,
        batch: Batch,
        *,
        on_tick: OnTick = lambda _: None,
        on_held: Callable[[], None] | None = None,
    ) -> Harvest:
        """One batch, shared out; `on_held` is called while all sessions are open and reset."""
        shares = shares_of(batch, self._size)
        self._said = [{"count": share.count, "ended": 0, "held": 0} for share in shares]
        for process, share in zip(self._processes, shares, strict=True):
            _tell(process, {"batch": asdict(share)})
        self._until(lambda said: "prepared" in said, START_SECONDS)
        self._tell_all({"go": time.monotonic() + HEAD_START_SECONDS})
        patience = batch.timeout_seconds + MARGIN_SECONDS
        if on_held is not None:
            self._until(_is_held, patience, on_tick)
            on_held()
            self._tell_all({"release": True})
        self._until(lambda said: "done" in said, patience, on_tick)
        reports = [said["done"] for said in self._said]
        return Harvest(
            outcomes=[outcome for report in reports for outcome in report["outcomes"]],
            wall_seconds=max(report["wall_seconds"] for report in reports),
            cpu_seconds=[report["cpu_seconds"] for report in reports],
            worst_lag_seconds=max(report["worst_lag_seconds"] for report in reports),
        )

    def _until(
        self, is_there: Callable[[Json], bool], seconds: float, on_tick: OnTick = lambda _: None
    ) -> None:
        """Wait until every generator has said it."""
        deadline = time.monotonic() + seconds
        while not all(map(is_there, self._said)):
            try:
                number, message = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise GeneratorLost(
                    f"a load generator has sent nothing for {seconds:.0f} s"
                ) from None
            if message is None:
                raise self._lost(number)
            self._said[number] |= message
            on_tick(sum(said["ended"] for said in self._said))

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Pass on what one generator says; None when it has ended."""
        assert process.stdout is not None
        try:
            with process.stdout as lines:
                for line in lines:
                    self._heard.put((number, orjson.loads(line)))
        finally:
            self._heard.put((number, None))

    def _tell_all(self, message: Json) -> None:
        for process in self._processes:
            _tell(process, message)

    def _lost(self, number: int) -> GeneratorLost:
        self._processes[number].kill()
        code = self._processes[number].wait()
        return GeneratorLost(
            f"generator {number} ended with exit code {code}",
            "the end of its output is in the log; too little memory is the usual cause",
        )


def _tell(process: subprocess.Popen[bytes], message: Json) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which its reader reports
        process.stdin.write(orjson.dumps(message) + b"\n")
        process.stdin.flush()


def _is_held(said: Json) -> bool:
    """Every session of the generator has been reset, or has failed."""
    return "done" in said or said["held"] + said["ended"] >= said["count"]


def shares_of(batch: Batch, members: int) -> list[Batch]:
    """The batch, shared out as evenly as it goes; each share with its own source addresses.

    Shares take the server's addresses in turn.
    """
    addresses = ((batch.host, batch.port), *batch.others)
    window = max(1, batch.window // members) if batch.window else 0
    shares = []
    for number in range(members):
        host, port = addresses[number % len(addresses)]
        count = batch.count // members + (number < batch.count % members)
        share = replace(batch, host=host, port=port, others=(), count=count, window=window)
        shares.append(replace(share, sources=sources_of(host, number, count)))
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
