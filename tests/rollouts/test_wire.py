# SPDX-License-Identifier: Apache-2.0
"""Connections to servers that do wrong: each end has its reason, and no socket outlives it."""

import asyncio
import gc
import socket
import ssl
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop
from websockets.frames import Frame, Opcode

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episodes import EpisodeStatus, FailureReason
from openenvd.rollouts.errors import EpisodeFailed
from openenvd.rollouts.session.session import Session, SessionFailed
from openenvd.rollouts.session_pool import SessionPool, SessionTiming
from openenvd.schema.protocol import MAX_MESSAGE_BYTES

from .peers import Peer, framed, observed, refused, serving

SECONDS = 60.0  # what never takes as long


async def ask_once(address: str) -> None:
    pool = SessionPool(1, timing=SessionTiming(close_seconds=0.1))
    session, _ = await pool.take(address)
    try:
        await session.reset({}, seconds=SECONDS)
    finally:
        pool.drop(address, session)
        await pool.close()


async def failure_at(address: str) -> EpisodeFailed:
    """What a session there ends with at its first question."""
    with pytest.raises(EpisodeFailed) as caught:
        await ask_once(address)
    return caught.value


TOO_LONG = b"\x81\x7f" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (Frame(Opcode.TEXT, b"masked").serialize(mask=True), "masking"),
        (b"\x83\x00", "opcode"),
        (b"\xc1\x08reserved", "reserved"),
        (TOO_LONG, "exceeds limit"),
    ],
    ids=["masked", "no such opcode", "reserved bit", "too long"],
)
async def test_a_server_that_breaks_the_protocol_is_disconnected_with_a_reason(
    sent: bytes, said: str
) -> None:
    async def play(peer: Peer) -> None:
        await peer.answer(sent)
        await peer.until_it_leaves()

    async with serving(play) as address:
        failure = await failure_at(address)
    assert failure.reason is FailureReason.PROTOCOL_ERROR
    assert said in str(failure)


async def test_a_waiting_question_fails_when_the_server_closes() -> None:
    """It may leave its socket open for as long as it likes."""

    async def play(peer: Peer) -> None:
        await peer.answer(framed(b"\x03\xf4going", Opcode.CLOSE), observed(70_000))
        await asyncio.Event().wait()

    async with serving(play) as address:
        failure = await failure_at(address)
    assert failure.reason is FailureReason.CONNECTION_LOST
    assert "going" in str(failure)


FRAGMENTED = (
    Frame(Opcode.TEXT, b'{"type":"observation",', fin=False).serialize(mask=False),
    framed(b"?", Opcode.PING),
    Frame(Opcode.CONT, b'"data":{"observation":"in parts"}}').serialize(mask=False),
)
STREAM = (  # what each question is answered with, and the bytes of the observation in it
    ([observed(1)], 1),
    ([framed(b"?" * 125, Opcode.PING), observed(80)], 80),
    ([observed(70_000), framed(b"?", Opcode.PING)], 70_000),
    ([observed(600_000)], 600_000),
    ([framed(b"", Opcode.PONG), *FRAGMENTED], len("in parts")),
    ([observed(300_000)], 300_000),
)
PINGS = 3


@pytest.mark.parametrize("cut_bytes", [1, 3, 1000, 1 << 20])
@pytest.mark.parametrize("at_once", [False, True], ids=["later", "behind the handshake"])
async def test_answers_are_whole_and_pings_answered_however_they_are_cut(
    cut_bytes: int, at_once: bool
) -> None:
    pings = PINGS + at_once

    async def play(peer: Peer) -> None:
        await peer.shake_hands(framed(b"?", Opcode.PING) if at_once else b"")
        for frames, size_bytes in STREAM:
            opcode = await peer.question()
            while opcode == Opcode.PONG:
                nonlocal pings
                pings -= 1
                opcode = await peer.question()
            sent = b"".join(frames)
            cut = max(cut_bytes, size_bytes // 500)  # not 600,000 segments
            for at in range(0, len(sent), cut):
                peer.writer.write(sent[at : at + cut])
                await asyncio.sleep(0)
        await peer.until_it_leaves()

    async with serving(play) as address:
        pool = SessionPool(1)
        session, _ = await pool.take(address)
        for _, size_bytes in STREAM:
            answer = await session.step(b"{}", seconds=SECONDS)
            assert len(answer.observation) == size_bytes
        pool.give_back(address, session)
        await pool.close()
    assert pings == 0


async def test_the_first_of_several_unasked_messages_is_the_reason() -> None:
    async def play(peer: Peer) -> None:
        await peer.shake_hands(refused(b"no room", b"CAPACITY_REACHED") + refused(b"and so on"))
        await peer.until_it_leaves()

    async with serving(play) as address:
        failure = await failure_at(address)
    assert (failure.reason, str(failure)) == (FailureReason.NO_CAPACITY, "no room")


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """What a server needs to be trusted by those who come."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    also = ["-addext", "subjectAltName=DNS:localhost"]
    also += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made.split(), *also], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


async def test_secure_sessions_read_the_certificates_once(
    certified: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 23 ms, which hundreds of sessions would each have held the loop for."""
    read: list[ssl.SSLContext] = []
    original = ssl.create_default_context

    def create() -> ssl.SSLContext:
        read.append(original())
        return read[-1]

    monkeypatch.setattr(ssl, "create_default_context", create)

    async def play(peer: Peer) -> None:
        await peer.shake_hands()
        for size_bytes in (10, 200_000, 1_000_000):
            await peer.question()
            peer.writer.write(observed(size_bytes, done=size_bytes == 1_000_000))
        await peer.until_it_leaves()

    async with serving(play, certified) as address:
        playing = RolloutCollector(address, lambda _: {}, concurrency=8)
        (batch,) = [batch async for batch in playing.batches(8, episodes=8)]
    assert {episode.status for episode in batch} == {EpisodeStatus.DONE}
    assert {len(episode.final_observation) for episode in batch} == {1_000_000}
    assert len(read) == 1


async def test_no_socket_stays_open_to_a_server_that_never_closes(
    certified: ssl.SSLContext,
) -> None:
    """TLS waits for the server's close message; the pool waits only `close_seconds`."""
    timing = SessionTiming(close_seconds=0.01)

    async def play(peer: Peer) -> None:
        await peer.answer(observed())
        await asyncio.Event().wait()

    async with serving(play, certified) as address:
        pool = SessionPool(1, timing=timing)
        session, _ = await pool.take(address)
        await session.reset({}, seconds=SECONDS)
        pool.give_back(address, session)
        await pool.close()
        assert await session.end(SECONDS)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("last", [b"", framed(b"?" * 500_000)], ids=["cut off", "no JSON"])
async def test_episodes_that_fail_hold_no_message(last: bytes) -> None:
    async def play(peer: Peer) -> None:
        await peer.answer(observed(500_000, done=False))
        await peer.question()
        peer.writer.write(last)
        await peer.writer.drain()

    async with serving(play) as address:
        playing = RolloutCollector(address, lambda _: {}, concurrency=1, retries=0)
        async for (episode,) in playing.batches(1, episodes=20):
            assert episode.failure is not None
            assert tracemalloc.get_traced_memory()[0] < 5_000_000


async def test_an_idle_session_that_the_server_has_ended_says_so_and_is_replaced() -> None:
    told, tell = asyncio.Event(), asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.answer(observed())
        await tell.wait()
        peer.writer.write(refused(b"idle for too long"))
        await peer.until_it_leaves()
        told.set()

    async with serving(play) as address:
        pool = SessionPool(2)
        session, _ = await pool.take(address)
        await session.reset({}, seconds=SECONDS)
        pool.give_back(address, session)
        tell.set()
        same, was_used = await pool.take(address)
        assert (same, was_used) == (session, True)
        with pytest.raises(EpisodeFailed, match="idle for too long") as caught:
            await session.reset({}, seconds=SECONDS)
        assert caught.value.reason is FailureReason.CONNECTION_LOST
        pool.drop(address, session)
        async with asyncio.timeout(SECONDS):
            await told.wait()
        _, was_used = await pool.take(address)
        assert not was_used
        await pool.close()


def test_a_server_that_refuses_before_it_was_asked_is_named() -> None:
    """The server's refusal may arrive before the client has sent its handshake."""
    server = socket.create_server(("127.0.0.1", 0), backlog=128)
    host, port = server.getsockname()

    def refuse_all() -> None:
        with suppress(OSError):  # the test has ended
            while True:
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
                connection.close()

    async def open_some() -> set[type]:
        opening = (
            Session.open(f"http://{host}:{port}", connect_seconds=SECONDS, close_seconds=1)
            for _ in range(20)
        )
        return {type(each) for each in await asyncio.gather(*opening, return_exceptions=True)}

    refusing = threading.Thread(target=refuse_all)
    refusing.start()
    try:
        for _ in range(40):
            assert uvloop.run(open_some()) == {SessionFailed}
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        refusing.join()
