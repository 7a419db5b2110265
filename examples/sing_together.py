# SPDX-License-Identifier: Apache-2.0
"""Four singers in one world: each hears those ahead, and the last writes what that sounds like.

pip install '.[brigade]'
python sing_together.py chord.wav

Each session is one singer of the `brigade`; all share one state. The second singer hears the first,
the third both, and so on down the line; the file has the chord that the last one hears.
"""

from __future__ import annotations

import base64
import sys
import wave
from contextlib import ExitStack

import numpy as np

from openenvd import Client
from openenvd.env_host.bundled.brigade.opus import (
    FRAME_SAMPLES,
    SAMPLE_RATE,
    Decoder,
    Encoder,
    pack,
    unpack,
)

CHORD = (220.0, 277.2, 329.6, 440.0)  # A major, in Hz
PACKETS = 5
FRAMES = 10  # of 60 ms, in each packet
SAMPLES = FRAMES * FRAME_SAMPLES
START = -4 * PACKETS * SAMPLES  # positions are samples of the brigade's clock; these are past


def tone(hertz: float) -> bytes:
    """Return a tone of all packets together, as 16-bit samples."""
    times = np.arange(PACKETS * SAMPLES) / SAMPLE_RATE
    return (8000 * np.sin(2 * np.pi * hertz * times)).astype(np.int16).tobytes()


def sing(path: str) -> int:
    """Write the chord to a file, and return how many voices the last singer heard."""
    env = Client().launch("brigade").wait()
    voices = [tone(hertz) for hertz in CHORD]
    encoders = [Encoder() for _ in CHORD]
    decoder, heard, most = Decoder(), bytearray(), 0
    with ExitStack() as stack:
        singers = [stack.enter_context(env.connect()) for _ in CHORD]
        joined = [singer.reset().observation for singer in singers]
        began = joined[0]["clock"] + START
        singers[0].step({"order": "lead"})
        singers[0].step({"order": "start", "read_at": began})
        for packet in range(PACKETS):
            at = began + packet * SAMPLES
            for singer, voice, encoder in zip(singers, voices, encoders, strict=True):
                pcm = voice[2 * packet * SAMPLES :][: 2 * SAMPLES]
                audio = base64.b64encode(pack(encoder.encode(pcm))).decode()
                action = {"audio": audio, "write_at": at, "read_at": at}
                mix = singer.step(action).observation
            heard += decoder.decode(unpack(base64.b64decode(mix["audio"])))
            most = max(most, mix["heard"])
    with wave.open(path, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(heard)
    return most


if __name__ == "__main__":
    print(f"{sing(sys.argv[1])} voices in {sys.argv[1]}")
