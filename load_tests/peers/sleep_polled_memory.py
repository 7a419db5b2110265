# SPDX-License-Identifier: Apache-2.0
"""The original's way between its processes, rebuilt to measure ours against.

One shared segment per shard, whose first byte says whose turn it is; both sides look every 0.1 ms
(https://github.com/jeffkaufman/bucket-brigade, `shm.py`; there on SharedArray, here on mapped
files of the same folder). Nobody is told when the other dies: the segment is all there is.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLEEP_SECONDS = 1 / 10_000  # the original's
POST, RESPONSE = 1, 2
SIZE = 1 + 2 + 10_000 + 4 + 199_998
FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Segment:
    """One shard's segment."""

    def __init__(self, name: str) -> None:
        with open(name, "r+b") as file:
            self.view = mmap.mmap(file.fileno(), SIZE)

    @property
    def is_posted(self) -> bool:
        """Whether it is the server's turn."""
        return self.view[0] == POST

    def put(self, text: bytes, data: bytes) -> None:
        """Fill it; the turn is passed on by the first byte."""
        view = self.view
        struct.pack_into("<H", view, 1, len(text))
        view[3 : 3 + len(text)] = text
        struct.pack_into("<I", view, 3 + len(text), len(data))
        view[7 + len(text) : 7 + len(text) + len(data)] = data

    def take(self) -> tuple[bytes, bytes]:
        """What is in it."""
        view = self.view
        (length,) = struct.unpack_from("<H", view, 1)
        text = bytes(view[3 : 3 + length])
        (size,) = struct.unpack_from("<I", view, 3 + length)
        return text, bytes(view[7 + length : 7 + length + size])

    def call(self, text: bytes, data: bytes = b"") -> tuple[bytes, bytes]:
        """A call, as a shard makes it."""
        self.put(text, data)
        self.view[0] = POST
        while self.is_posted:
            time.sleep(SLEEP_SECONDS)
        return self.take()

    def close(self) -> None:
        """Detach."""
        self.view.close()


def serve(names: Sequence[str]) -> None:
    """The original's server: says back what it is told, after as long as it is told."""
    segments = [Segment(name) for name in names]
    while True:
        did_something = False
        for segment in segments:
            if segment.is_posted:
                text, data = segment.take()
                if seconds := json.loads(text).get("seconds"):
                    print("busy", flush=True)
                    time.sleep(seconds)
                segment.put(text, data)
                segment.view[0] = RESPONSE
                did_something = True
        if not did_something:
            time.sleep(SLEEP_SECONDS)


@contextmanager
def server(shards: int) -> Iterator[tuple[list[str], subprocess.Popen[str]]]:
    """A running server and the names of its segments."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        names = [f"{folder}/{number}" for number in range(shards)]
        for name in names:
            Path(name).write_bytes(bytes(SIZE))
        process = start("serve", *names)
        try:
            yield names, process
        finally:
            end(process)


def start(*words: str) -> subprocess.Popen[str]:
    """This program in a process of its own."""
    command = [sys.executable, "-m", "load_tests.peers.sleep_polled_memory", *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill it."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def successor_gets_anothers_reply(call_seconds: float = 0.2) -> bool:
    """Kill a shard while its call is being served; whose reply does its successor receive?"""
    with server(1) as ([name], state):
        victim = start("call", name, json.dumps({"of": "victim", "seconds": call_seconds}))
        assert state.stdout is not None
        state.stdout.readline()  # its call is being served
        os.kill(victim.pid, signal.SIGKILL)
        end(victim)
        segment = Segment(name)
        text, _ = segment.call(json.dumps({"of": "successor"}).encode())
        segment.close()
        return bool(json.loads(text)["of"] != "successor")


def round_trips_a_second(calls: int) -> float:
    """One shard, one call after the other: the scheme knows no more."""
    with server(1) as ([name], _):
        segment = Segment(name)
        segment.call(b"{}")
        began = time.perf_counter()
        for _ in range(calls):
            segment.call(b"{}")
        seconds = time.perf_counter() - began
        segment.close()
        return calls / seconds


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    else:
        Segment(sys.argv[2]).call(sys.argv[3].encode())
