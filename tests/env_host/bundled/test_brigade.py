# SPDX-License-Identifier: Apache-2.0
"""The bucket brigade: the codec, the mixing buffer, and singers of several shards in one song."""

import base64
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from openenvd.env_host.bundled.brigade import mixing, opus
from openenvd.env_host.bundled.brigade.environment import (
    BrigadeAction,
    BrigadeEnvironment,
    BrigadeObservation,
)
from openenvd.env_host.shared_state.connection import ProxyFactory, StateLink
from openenvd.env_host.shared_state.frames import WorldCallFailed
from openenvd.env_host.shared_state.process import StateProcess
from openenvd.schema.protocol import HOST_CONFIG_VARIABLE
from openenvd.system.files.installation import install_command

LOOKAHEAD_SAMPLES = 312  # by which libopus delays what it encodes
FRAMES = 10


def tone(hertz: float, samples: int = FRAMES * opus.FRAME_SAMPLES) -> mixing.Pcm:
    time = np.arange(samples) / opus.SAMPLE_RATE
    return (8000 * np.sin(2 * np.pi * hertz * time)).astype(np.int16)


def likeness(one: mixing.Pcm, other: mixing.Pcm) -> float:
    return float(np.corrcoef(one.astype(float), other.astype(float))[0, 1])


def gain(singers: int) -> float:
    return mixing.LOUDNESS * math.sqrt((1 + mixing.PHANTOMS) / (singers + mixing.PHANTOMS))


# The codec


def test_coding_preserves_a_voice_and_frames_are_packed_and_unpacked() -> None:
    voice = tone(220)
    frames = opus.Encoder().encode(voice.tobytes())
    heard = np.frombuffer(opus.Decoder().decode(frames), np.int16)
    assert len(frames) == FRAMES
    assert likeness(voice[:20_000], heard[LOOKAHEAD_SAMPLES:][:20_000]) > 0.99
    with pytest.raises(ValueError, match="no whole number of frames"):
        opus.Encoder().encode(bytes(opus.FRAME_BYTES // 2))
    frames = [os.urandom(size) for size in (0, 1, 400, 65_535)]
    assert opus.unpack(opus.pack(frames)) == frames
    assert opus.unpack(b"") == opus.unpack(opus.pack([])) == []
    with pytest.raises(ValueError, match="do not fit"):
        opus.pack([b""] * 256)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_singer_costs_no_threads() -> None:
    before = set(os.listdir("/proc/self/task"))
    singers = [(opus.Encoder(), opus.Decoder()) for _ in range(5)]
    for encoder, decoder in singers:
        decoder.decode(encoder.encode(bytes(opus.FRAME_BYTES)))
    assert set(os.listdir("/proc/self/task")) <= before  # earlier tests' may end meanwhile
    assert os.sched_getaffinity(0) == os.sched_getaffinity(os.getpid())


@pytest.mark.parametrize("frame", [b"", b"\0", b"garbage" * 10, b"\xff" * 100])
def test_an_invalid_packet_is_refused(frame: bytes) -> None:
    decoder = opus.Decoder()
    with pytest.raises(opus.NotOpus):
        decoder.decode([frame])
    [good] = opus.Encoder().encode(bytes(opus.FRAME_BYTES))
    assert len(decoder.decode([good])) == opus.FRAME_BYTES


@pytest.mark.parametrize("cut", [1, 2, 3, 10])
def test_a_packet_with_a_wrong_length_field_is_refused(cut: int) -> None:
    packet = opus.pack([b"12345", b"678"])
    for broken in (packet[:-cut], packet + bytes(cut)):
        with pytest.raises(opus.NotOpus):
            opus.unpack(broken)


# The mixing buffer


def test_audio_is_heard_at_its_position_of_its_round_only() -> None:
    buffer, voice = mixing.MixingBuffer(100_000), np.full(1000, 100, np.int16)
    buffer.write(5000, voice, now=10_000)
    heard, most = buffer.read(4500, 2000, now=10_000)
    expected = np.concatenate([np.zeros(500), np.full(1000, 100 * gain(1)), np.zeros(500)])
    np.testing.assert_allclose(heard, expected, atol=1)
    assert most == 1
    buffer, loud = mixing.MixingBuffer(100_000), np.full(100, 5000, np.int16)
    for position in range(0, 100_000, 10_000):
        buffer.write(position, loud, now=position + 100)
    for position in range(100_000, 300_000, 7_000):
        heard, most = buffer.read(position, 7_000, now=position + 7_000)
        assert not heard.any()
        assert most == 0


def test_voices_are_added_the_more_the_softer_and_clipped_not_wrapped_around() -> None:
    buffer = mixing.MixingBuffer(100_000)
    for _ in range(4):
        buffer.write(0, np.full(100, 1000, np.int16), now=100)
    heard, most = buffer.read(0, 100, now=100)
    np.testing.assert_allclose(heard, 4000 * gain(4), atol=1)
    assert most == 4
    buffer = mixing.MixingBuffer(100_000)
    for _ in range(10):
        buffer.write(0, np.full(10, 32_000, np.int16), now=10)
        buffer.write(10, np.full(10, -32_000, np.int16), now=10)
    heard, _ = buffer.read(0, 20, now=10)
    assert heard.tolist() == [32_767] * 10 + [-32_768] * 10


@pytest.mark.parametrize("position", [60_000, 60_001, 99_990, 100_000])
def test_a_span_may_lie_across_the_end_of_the_ring(position: int) -> None:
    buffer, voice = mixing.MixingBuffer(100_000), np.arange(1000, dtype=np.int16)
    buffer.write(position, voice, now=101_000)
    heard, _ = buffer.read(position, 1000, now=101_000)
    np.testing.assert_allclose(heard, voice * gain(1), atol=1)


@pytest.mark.parametrize(
    "position",
    [
        1_000_000 + mixing.FUTURE_SAMPLES - 99,
        1_000_000 + mixing.FUTURE_SAMPLES - mixing.BUFFER_SAMPLES - 1,
    ],
)
def test_positions_outside_of_the_buffer_are_refused(position: int) -> None:
    with pytest.raises(mixing.WrongTime):
        mixing.MixingBuffer().read(position, 100, now=1_000_000)


# Singers of two shards


@pytest.fixture
def state() -> Iterator[StateProcess]:
    process = StateProcess(BrigadeEnvironment)
    process.start()
    yield process
    process.stop()


@pytest.fixture
async def links(state: StateProcess) -> AsyncIterator[list[StateLink]]:
    links = [StateLink(state.address) for n in (0, 1)]
    yield links
    for link in links:
        await link.close()


def singer(link: StateLink) -> BrigadeEnvironment:
    env = ProxyFactory(BrigadeEnvironment, link)()
    assert isinstance(env, BrigadeEnvironment)
    return env


async def begin(leader: BrigadeEnvironment, at: int = 0) -> BrigadeObservation:
    await leader.reset_async()
    await leader.step_async(BrigadeAction(order="lead"))
    return await leader.step_async(BrigadeAction(order="start", read_at=at, frames=1))


async def sing(env: BrigadeEnvironment, voice: mixing.Pcm, at: int) -> BrigadeObservation:
    packet = base64.b64encode(opus.pack(opus.Encoder().encode(voice.tobytes()))).decode()
    return await env.step_async(BrigadeAction(audio=packet, write_at=at, read_at=at))


def mix_of(observation: BrigadeObservation) -> mixing.Pcm:
    return np.frombuffer(
        opus.Decoder().decode(opus.unpack(base64.b64decode(observation.audio))), np.int16
    )


async def test_followers_hear_the_leader(links: list[StateLink]) -> None:
    leader, follower = (singer(link) for link in links)
    await begin(leader, at=-200_000)
    voice = tone(220)
    sung = await sing(leader, voice, at=-100_000)
    await follower.reset_async()
    heard = await follower.step_async(BrigadeAction(read_at=-100_000, frames=FRAMES))
    assert (sung.written, sung.reward, sung.leads) == (True, 1.0, True)
    assert (heard.heard, heard.singers, heard.leads, heard.has_leader) == (1, 2, False, True)
    twice_delayed = mix_of(heard)[2 * LOOKAHEAD_SAMPLES :]
    assert likeness(twice_delayed[:20_000], voice[:20_000]) > 0.98


async def test_the_leader_does_not_hear_followers(links: list[StateLink]) -> None:
    leader, follower = (singer(link) for link in links)
    await begin(leader, at=-400_000)
    ahead = await leader.step_async(BrigadeAction(read_at=-100_000, frames=FRAMES))
    await sing(follower, tone(300), at=-100_000)
    behind = await leader.step_async(BrigadeAction(read_at=-100_000, frames=FRAMES))
    assert (ahead.heard, behind.heard) == (0, 1)  # only by reading the place again


async def test_each_singer_in_the_chain_hears_all_those_ahead(links: list[StateLink]) -> None:
    singers = [singer(links[n % 2]) for n in range(6)]
    await begin(singers[0], at=-200_000)
    heard = [(await sing(env, tone(200), at=-150_000)).heard for env in singers]
    assert heard == [1, 2, 3, 4, 5, 6]  # one's own voice included


async def test_places_are_given_out_in_order(links: list[StateLink]) -> None:
    joined = [await singer(links[n % 2]).reset_async() for n in range(8)]
    assert [o.delay // mixing.DELAY_SAMPLES for o in joined] == [0, 1, 2, 3, 4, 5, 0, 1]
    assert (await singer(links[0]).reset_async(place=4)).delay == 4 * mixing.DELAY_SAMPLES


async def test_only_the_leader_begins_and_ends_the_song(links: list[StateLink]) -> None:
    leader, other = (singer(link) for link in links)
    await begin(leader)
    await other.reset_async()
    for order in ("start", "stop"):
        with pytest.raises(WorldCallFailed, match="PermissionError: only the leading"):
            await other.step_async(BrigadeAction.model_validate({"order": order}))
    over = await leader.step_async(BrigadeAction(order="stop", read_at=100))
    assert over.song_end == 100
    assert over.done


async def test_nothing_is_heard_outside_of_the_song(links: list[StateLink]) -> None:
    leader = singer(links[0])
    await begin(leader, at=-50_000)
    before = await sing(leader, tone(220), at=-100_000)
    assert (before.written, before.heard, before.reward) == (False, 0, 0.0)
    assert not mix_of(before).any()


async def test_when_the_leader_leaves_the_song_is_over(links: list[StateLink]) -> None:
    leader, follower = (singer(link) for link in links)
    await begin(leader)
    leader.close()
    await links[0].close()
    seen = await follower.reset_async()
    while seen.has_leader:
        seen = await follower.reset_async()
    assert seen.song_end is not None
    assert seen.singers == 1


async def test_a_broken_packet_is_the_singers_own_error(links: list[StateLink]) -> None:
    env = singer(links[0])
    await begin(env, at=-100_000)
    for audio in ("!", "AA", base64.b64encode(opus.pack([b"garbage" * 10])).decode()):
        with pytest.raises(opus.NotOpus):
            await env.step_async(BrigadeAction(audio=audio, write_at=-50_000, read_at=-50_000))
    assert (await sing(env, tone(220), at=-50_000)).written
    await begin(env)
    await env.world.start_song(at=-(10**9))
    with pytest.raises(WorldCallFailed, match=r"WrongTime: .* s ago is no longer there"):
        await sing(env, tone(220), at=-(10**9))


def test_a_brigade_without_shared_state_is_refused_with_a_reason() -> None:
    with pytest.raises(RuntimeError, match="served by openenvd"):
        BrigadeEnvironment()


@pytest.mark.parametrize("missing", ["numpy", "av"])
def test_a_missing_extra_is_named_with_its_install_command(missing: str) -> None:
    module = "openenvd.env_host.bundled.brigade.environment"
    code = f"import sys; sys.modules[{missing!r}] = None; import {module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert install_command("brigade") in ran.stderr.splitlines()[-1]
    config = {"name": "brigade", "env_class": f"{module}:BrigadeEnvironment"}
    code = (
        f"import sys; sys.modules[{missing!r}] = None;"
        "from openenvd.env_host.main import main; sys.exit(main())"
    )
    environ = {**os.environ, HOST_CONFIG_VARIABLE: json.dumps(config)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ
    )
    assert install_command("brigade") in ran.stderr
    assert "Traceback" not in ran.stderr
