# SPDX-License-Identifier: Apache-2.0
"""Messages with descriptors, lines of JSON, signals as bytes, words for exits, back-off."""

import os
import select
import signal
import socket
from collections.abc import Iterator

import pytest

from openenvd.system.process.backoff import backoff_seconds
from openenvd.system.process.descriptors import Message, close_all, receive_message, send_message
from openenvd.system.process.proc import split_wait_status
from openenvd.system.process.signal_pipe import SignalPipe
from openenvd.system.text.json_lines import LineBuffer

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


def test_a_message_carries_json_bytes_and_descriptors(ends: Ends) -> None:
    reading, writing = os.pipe()
    assert send_message(ends[0], Message({"op": "take"}, b"\n\0", (writing,)))
    received = receive_message(ends[1])
    assert received is not None
    assert (received.head, received.body) == ({"op": "take"}, b"\n\0")
    assert not os.get_inheritable(received.fds[0])
    os.write(received.fds[0], b"x")
    assert os.read(reading, 1) == b"x"
    close_all((reading, writing, *received.fds))


def test_descriptors_of_a_broken_message_are_closed_and_the_end_is_an_error(ends: Ends) -> None:
    before = set(os.listdir("/dev/fd"))
    socket.send_fds(ends[0], [b"no json"], [0])
    with pytest.raises(ValueError, match="Expecting value"):
        receive_message(ends[1])
    assert set(os.listdir("/dev/fd")) == before
    ends[1].setblocking(False)
    assert receive_message(ends[1]) is None
    ends[0].close()
    with pytest.raises(EOFError):
        receive_message(ends[1])


def test_the_last_message_of_a_process_that_left_others_unread_arrives(ends: Ends) -> None:
    assert send_message(ends[1], Message({"never": "read"}))
    assert send_message(ends[0], Message({"last": "words"}))
    ends[0].close()
    received = receive_message(ends[1])
    assert received is not None
    assert received.head == {"last": "words"}
    with pytest.raises(EOFError):
        receive_message(ends[1])


def test_lines_are_whole_however_they_were_cut() -> None:
    lines = LineBuffer(8)
    assert lines.feed(b"one\ntw") == [b"one"]
    assert lines.feed(b"o\n") == [b"two"]
    assert lines.feed(b"longer than that") == []
    assert lines.has_overflowed
    assert lines.feed(b"\nthree\n") == [b"", b"three"]


def test_a_signal_makes_its_pipe_readable() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    pipe = SignalPipe((signal.SIGUSR1,), ignored=(signal.SIGUSR2,))
    try:
        assert pipe.take() == set()
        for number in before:
            signal.raise_signal(number)
        assert select.select([pipe], [], [], 5.0)[0] == [pipe]
        assert pipe.take() == {signal.SIGUSR1}
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        close_all(pipe.fds)


@pytest.mark.parametrize(
    ("wait_status", "split"),
    [(3 << 8, (3, None)), (signal.SIGSEGV | 0x80, (None, 11)), (35, (None, 35))],
)
def test_a_wait_status_is_a_code_or_a_signal(
    wait_status: int, split: tuple[int | None, int | None]
) -> None:
    assert split_wait_status(wait_status) == split


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0.0), (1, 0.1), (2, 0.2), (5, 1.6), (7, 5.0), (10**6, 5.0)]
)
def test_backoff_doubles_up_to_its_bound(failures: int, seconds: float) -> None:
    assert backoff_seconds(failures, first=0.1, longest=5.0) == seconds
