# SPDX-License-Identifier: Apache-2.0
"""Singers in real time: each sends a packet of 600 ms every 600 ms, without waiting for answers.

`load_tests/brigade.py` starts this process, and writes `go` when all singers are connected. An
answer's latency counts from when its packet was *due*, so that a delay in sending counts, too. A
miss is an answer that came after the next packet was due: the singer would have heard a gap. The
program follows the original's `stress_helper.py`; the audio is a voice, not silence.
"""

import asyncio
import base64
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from openenvd.env_host.bundled.brigade.opus import FRAME_SAMPLES, SAMPLE_RATE, Encoder, pack
from openenvd.rollouts.bench.generator import CLOSE_FRAME, Connection
from openenvd.system.net.websocket import unmasked_client_frame, upgrade_request

PACKET_FRAMES = 10
PACKET_SAMPLES = PACKET_FRAMES * FRAME_SAMPLES
PACKET_SECONDS = PACKET_SAMPLES / SAMPLE_RATE
BEHIND_SAMPLES = 2 * SAMPLE_RATE  # a singer's audio is written this far behind what it reads
WARM_UP_PACKETS = 2  # of each singer, not counted
CHECK_EVERY = 25  # packets between two whose answers are decoded and checked


@dataclass
class Tally:
    """The measurements of all singers of this process."""

    packets: int = 0  # sent
    latencies: list[float] = field(default_factory=list)  # seconds, since the packet was due
    misses: int = 0
    faults: list[str] = field(default_factory=list)
    heard: int = 0  # most voices in one mix


def voice() -> str:
    """Return one packet of a singing voice, in base64."""
    times = np.arange(PACKET_SAMPLES * 2) / SAMPLE_RATE
    pitch = 220 * (1 + 0.01 * np.sin(2 * np.pi * 5.5 * times))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    tones = sum(np.sin(n * phase) / n for n in range(1, 12))
    breath = np.random.default_rng(1).normal(size=times.size)
    pcm = (3000 * tones + 150 * breath).astype(np.int16)
    frames = Encoder().encode(pcm.tobytes())
    return base64.b64encode(pack(frames[PACKET_FRAMES:])).decode()


class Singer(Connection):
    """One client on `/ws`."""

    def __init__(self, tally: Tally, audio: str) -> None:
        super().__init__(upgrade_request("localhost", "/ws"))
        self._tally = tally
        self._audio = audio
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._due: list[float] = []
        self._answered = 0
        self._position = 0
        self.is_over = False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over:
            self._tally.faults.append(f"connection lost: {exc}")
            self._answers.put_nowait(b'{"type": "lost"}')

    def on_open(self, head: str) -> None:
        self._answers.put_nowait(head.encode())

    def on_refused(self, line: str) -> None:
        self._answers.put_nowait(line.encode())

    def on_close(self, code: int, reason: str) -> None:
        self._tally.faults.append(f"closed with {code}: {reason}")

    def on_message(self, text: bytes) -> None:
        if self._due:
            self._answer(text)
        else:
            self._answers.put_nowait(text)

    async def join(self, *, leads: bool) -> None:
        """Connect and reset; the leader begins the song."""
        upgrade = await self._answers.get()
        if not upgrade.startswith(b"HTTP/1.1 101"):
            raise SystemExit(f"no session: {upgrade[:200]!r}")
        seen = await self._ask("reset", {})
        if leads:
            await self._ask("step", {"order": "lead"})
            start = seen["clock"] - 60 * SAMPLE_RATE
            await self._ask("step", {"order": "start", "read_at": start, "frames": 1})
        self._position = seen["clock"] - seen["delay"] - 2 * PACKET_SAMPLES
        self._joined_at = time.monotonic()

    async def sing(self, first_due: float, packets: int) -> None:
        """Send packets when they are due; returns once a further answer would be a miss."""
        late = first_due - self._joined_at
        self._position += int(late * SAMPLE_RATE)
        for number in range(packets):
            due = first_due + number * PACKET_SECONDS
            await asyncio.sleep(due - time.monotonic())
            self._due.append(due)
            read_at = self._position + number * PACKET_SAMPLES
            text = (
                f'{{"type":"step","data":{{"audio":"{self._audio}","read_at":{read_at},'
                f'"write_at":{read_at - BEHIND_SAMPLES}}}}}'
            )
            self.write(unmasked_client_frame(text.encode()))
        await asyncio.sleep(first_due + packets * PACKET_SECONDS - time.monotonic())
        self._tally.packets += packets - WARM_UP_PACKETS
        self._tally.misses += packets - max(self._answered, WARM_UP_PACKETS)  # not answered at all
        self.is_over = True

    def leave(self) -> None:
        self.write(CLOSE_FRAME)
        self.close()

    def _answer(self, payload: bytes) -> None:
        if self.is_over or self._answered >= len(self._due):
            return
        number, self._answered = self._answered, self._answered + 1
        if not payload.startswith(b'{"type":"observation"'):
            self._tally.faults.append(payload[:200].decode())
        if number % CHECK_EVERY == 0:
            self._check(json.loads(payload))
        if number >= WARM_UP_PACKETS:
            latency = time.monotonic() - self._due[number]
            self._tally.latencies.append(latency)
            self._tally.misses += latency > PACKET_SECONDS

    def _check(self, message: dict[str, Any]) -> None:
        if message["type"] != "observation":
            return
        seen = message["data"]["observation"]
        if not seen["written"] or len(seen["audio"]) < PACKET_FRAMES * 4:
            self._tally.faults.append(f"not sung, or nothing heard: {str(seen)[-300:]}")
        self._tally.heard = max(self._tally.heard, seen["heard"])

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps({"type": kind, "data": data})
        self.write(unmasked_client_frame(text.encode()))
        message = json.loads(await self._answers.get())
        if message["type"] != "observation":
            raise SystemExit(f"{kind} was answered with {message}")
        seen: dict[str, Any] = message["data"]["observation"]
        return seen


async def run(port: int, count: int, packets: int, leads: bool) -> None:
    """Let all singers of this process connect, wait for `go`, sing, and print the measurements."""
    loop = asyncio.get_running_loop()
    tally, audio, singers = Tally(), voice(), []
    for number in range(count):
        _, singer = await loop.create_connection(lambda: Singer(tally, audio), "127.0.0.1", port)
        singers.append(singer)
        await singer.join(leads=leads and number == 0)
    print(json.dumps("ready"), flush=True)
    begin = float(await loop.run_in_executor(None, sys.stdin.readline))
    used = time.process_time()
    await asyncio.gather(
        *(s.sing(begin + PACKET_SECONDS * n / count, packets) for n, s in enumerate(singers))
    )
    used = time.process_time() - used
    for singer in singers:
        singer.leave()
    found = {
        "packets": tally.packets,
        "latencies": tally.latencies,
        "misses": tally.misses,
        "faults": tally.faults[:5],
        "heard": tally.heard,
        "cpu_seconds": used,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "leads"))
