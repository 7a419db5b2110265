# SPDX-License-Identifier: Apache-2.0
"""Runs the load generators of one measurement: starts, synchronises, reads and stops them.

    Crew ──one pipe each──▶ generator 0..n-1 ──thousands of sockets──▶ server

A thread for each generator waits for its answer: while a batch runs, the crew takes no CPU from the
server under test. A generator exits when its stdin ends, so none outlives its crew.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import orjson

from ...system.text.json_lines import Json
from .generator import Batch
from .plan import GeneratorLost

START_SECONDS = 180.0  # for a generator to import what it needs; upstream's client: 8 s of CPU
HEAD_START_SECONDS = 0.05  # from `go` to the first connection: everybody has read it by then
MARGIN_SECONDS = 30.0  # beyond a batch's own time-out, for outcomes to be reported
END_SECONDS = 5.0
PORTS_OF_AN_ADDRESS = 20_000  # of one source address towards one server, with room to spare


@dataclass(slots=True)
class Harvest:
    """The results of one batch, from all generators."""

    outcomes: list[Json]
    wall_seconds: float
    cpu_seconds: list[float]  # of each generator


class Crew:
    """A set of generators; a context manager that stops them all.

    Args:
        program: what is started, if not our own generator: it reads and writes the same lines.
    """

    def __init__(self, size: int, program: Sequence[str] = ()) -> None:
        self._size = size
        self._program = program or (sys.executable, "-P", "-m", f"{__package__}.generator")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(size, "generators")

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        try:
            for _ in range(self._size):
                self._processes.append(subprocess.Popen(self._program, stdin=pipe, stdout=pipe))
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
        self._threads.shutdown()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()

    def run(self, batch: Batch) -> Harvest:
        """Run one batch, shared out."""
        shares = shares_of(batch, self._size)
        for process, share in zip(self._processes, shares, strict=True):
            _tell(process, {"batch": asdict(share)})
        self._answers("prepared", START_SECONDS)
        started_at = time.monotonic() + HEAD_START_SECONDS
        for process in self._processes:
            _tell(process, {"go": started_at})
        reports = self._answers("done", batch.timeout_seconds + MARGIN_SECONDS)
        return Harvest(
            outcomes=[outcome for report in reports for outcome in report["outcomes"]],
            wall_seconds=max(report["wall_seconds"] for report in reports),
            cpu_seconds=[report["cpu_seconds"] for report in reports],
        )

    def _answers(self, name: str, seconds: float) -> list[Any]:
        """Wait until every generator has answered; return the answers.

        Raises:
            GeneratorLost: One has exited, or has not answered in time.
        """
        reads = {self._threads.submit(_read, process): process for process in self._processes}
        try:
            for read in as_completed(reads, seconds):
                if not read.result():
                    raise _lost(reads[read])
        except TimeoutError:
            raise GeneratorLost(f"a load generator has sent nothing for {seconds:.0f} s") from None
        return [orjson.loads(read.result())[name] for read in reads]


def _read(process: subprocess.Popen[bytes]) -> bytes:
    """Return the next line of a generator; nothing when it has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


def _lost(process: subprocess.Popen[bytes]) -> GeneratorLost:
    process.kill()
    return GeneratorLost(
        f"a load generator ended with exit code {process.wait()}",
        "the end of its output is in the log; too little memory is the usual cause",
    )


def _tell(process: subprocess.Popen[bytes], message: Json) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which its reader reports
        process.stdin.write(orjson.dumps(message) + b"\n")
        process.stdin.flush()


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
