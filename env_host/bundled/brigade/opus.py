# SPDX-License-Identifier: Apache-2.0
"""Opus frames to PCM and back: mono, 48 kHz, 60 ms a frame, 16 bits a sample.

The codec is libopus, which PyAV's wheels carry. Encoder and decoder have a memory: one of each
belongs to one singer, and the frames must come in order. One thread at a time.

Several frames travel as the bucket brigade packs them: how many (1 byte), then each with its length
in front (2 bytes, big-endian).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import av
from av.codec import CodecContext

SAMPLE_RATE = 48_000  # Hz
FRAME_SAMPLES = SAMPLE_RATE * 60 // 1000
FRAME_BYTES = 2 * FRAME_SAMPLES
BIT_RATE = 51_000  # what libopus picks itself for one voice in 60 ms frames
COMPLEXITY = 9  # libopus's own default, of 0 to 10
MAX_FRAMES = 255  # in one packet: the count is one byte
_LENGTH = struct.Struct(">H")


class NotOpus(ValueError):
    """The data that was sent is not Opus, or is not packed as required."""


class Encoder:
    """One singer's voice on its way out."""

    def __init__(self) -> None:
        context: Any = CodecContext.create("libopus", "w")
        context.sample_rate = SAMPLE_RATE
        context.layout = "mono"
        context.format = "s16"
        context.bit_rate = BIT_RATE
        context.options = {
            "frame_duration": "60",
            "application": "audio",
            "compression_level": str(COMPLEXITY),
        }
        context.open()
        self._context = context
        self._samples = 0

    def encode(self, pcm: bytes) -> list[bytes]:
        """Return one packet for each frame; raises `ValueError` unless all frames are whole."""
        if len(pcm) % FRAME_BYTES:
            raise ValueError(f"{len(pcm)} bytes are no whole number of frames of {FRAME_BYTES}")
        with _on_one_core() if self._samples == 0 else nullcontext():
            return [
                packet
                for start in range(0, len(pcm), FRAME_BYTES)
                for packet in self._encode(pcm[start : start + FRAME_BYTES])
            ]

    def _encode(self, pcm: bytes) -> list[bytes]:
        frame: Any = av.AudioFrame("s16", "mono", FRAME_SAMPLES)
        frame.sample_rate = SAMPLE_RATE
        frame.planes[0].update(pcm)
        frame.pts = self._samples
        self._samples += FRAME_SAMPLES
        return [bytes(packet) for packet in self._context.encode(frame)]


class Decoder:
    """One singer's voice on its way in."""

    def __init__(self) -> None:
        context: Any = CodecContext.create("libopus", "r")
        context.sample_rate = SAMPLE_RATE
        context.layout = "mono"
        self._context = context

    def decode(self, frames: Sequence[bytes]) -> bytes:
        """Return their samples; raises `NotOpus` unless each is a frame of `FRAME_SAMPLES`."""
        return b"".join(self._decode(frame) for frame in frames)

    def _decode(self, frame: bytes) -> bytes:
        try:
            decoded = self._context.decode(av.Packet(frame)) if frame else []
        except (av.error.FFmpegError, ValueError) as exc:
            raise NotOpus(f"not an Opus frame: {exc}") from exc
        pcm = b"".join(bytes(one.planes[0])[: 2 * one.samples] for one in decoded)
        if len(pcm) != FRAME_BYTES:
            raise NotOpus(f"a frame of {len(pcm) // 2} samples; each must have {FRAME_SAMPLES}")
        return pcm


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Show PyAV one core while an encoder is first used.

    PyAV puts a filter graph before each encoder, which starts a thread for every core that it sees:
    1,000 idle threads for 250 singers.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)  # of this thread alone
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def pack(frames: Sequence[bytes]) -> bytes:
    """Several frames as one packet. Raises `ValueError`: there are more than `MAX_FRAMES`."""
    if len(frames) > MAX_FRAMES:
        raise ValueError(f"{len(frames)} frames do not fit into one packet of {MAX_FRAMES}")
    return bytes([len(frames)]) + b"".join(_LENGTH.pack(len(f)) + f for f in frames)


def unpack(packet: bytes) -> list[bytes]:
    """The frames of a packet. Raises `NotOpus`: it is shorter or longer than it says."""
    if not packet:
        return []
    found, at = [], 1
    try:
        for _ in range(packet[0]):
            (length,) = _LENGTH.unpack_from(packet, at)
            at += _LENGTH.size + length
            found.append(packet[at - length : at])
    except struct.error as exc:
        raise NotOpus("the packet is shorter than its frames") from exc
    if at != len(packet):
        raise NotOpus("the packet is not as long as its frames")
    return found
