# SPDX-License-Identifier: Apache-2.0
"""Signals that a process, but none of its children, handles: `SignalPipe` and `take_over`.

Every forked child inherits a handler and the descriptor that wakes a loop or a `select`, even if
other code forks it (`multiprocessing`, a step of an environment). A SIGTERM for such a child would
be written into its parent's pipe, and the child would continue. So around each fork of Python
(`os.register_at_fork`):

    before the fork    the signals that were taken over are blocked, in the thread that forks
    in the child       the wake-up descriptor is reset, and each handler is what it was before,
                       unless other code has replaced it meanwhile
    in both            they are no longer blocked

A process that has taken over no signal is left alone.
"""

from __future__ import annotations

import os
import signal
import time
from _thread import get_ident, start_new_thread
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LATE_SECONDS = 0.2  # until a fork has returned in the child, even on a busy machine
DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # of an env host

_taken: dict[signal.Signals, tuple[Any, Any]] = {}  # our handler, and the earlier one
_masks: dict[int, set[int]] = {}  # of the threads that fork, by their idents


def take_over(
    numbers: Iterable[signal.Signals], set_handler: Callable[[signal.Signals], object]
) -> None:
    """Let `set_handler` set the handler of each signal, for this process and not its children."""
    _follow_forks()
    for number in numbers:
        before = handler_before(number)
        set_handler(number)
        _taken[number] = signal.getsignal(number), before


def handler_before(number: signal.Signals) -> Any:
    """Return the handler that a signal has without ours."""
    handler = signal.getsignal(number)
    ours, before = _taken.get(number, (None, None))
    return before if handler is ours and handler is not None else handler


class SignalPipe:
    """Receives signals as bytes of a pipe that a process can select on."""

    def __init__(
        self, numbers: Iterable[signal.Signals], *, ignored: Iterable[signal.Signals] = ()
    ) -> None:
        """Take `numbers` over, and ignore `ignored`. Call it in the main thread."""
        self.fds = self._reading, writing = os.pipe()
        for fd in self.fds:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # The byte in the pipe is the handler.
        take_over(numbers, lambda number: signal.signal(number, lambda *_: None))
        take_over(ignored, lambda number: signal.signal(number, signal.SIG_IGN))

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reading

    def take(self) -> set[int]:
        """Return the numbers of the signals that have arrived since the last call."""
        try:
            return set(os.read(self._reading, 4096))
        except BlockingIOError:
            return set()


def _before_fork() -> None:
    _masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _taken)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(get_ident()))


def _in_child() -> None:
    if _taken:
        signal.set_wakeup_fd(-1)
        for number in list(_taken):
            if (before := handler_before(number)) is not None:  # None: set by a C library
                signal.signal(number, before)
        late = [n for n in signal.sigpending() & set(_taken) if callable(signal.getsignal(n))]
        _taken.clear()
        for number in late:
            signal.sigwait({number})
        if late:  # Python would ignore what its handler raises here
            start_new_thread(_send_again, (late,))
    try:
        _after_fork()
    except KeyboardInterrupt:  # it has arrived meanwhile
        start_new_thread(_send_again, ([signal.SIGINT],))


def _send_again(numbers: list[signal.Signals]) -> None:
    time.sleep(LATE_SECONDS)
    for number in numbers:
        os.kill(os.getpid(), number)


@cache
def _follow_forks() -> None:
    """Register fork hooks after `random` and others: exceptions of a handler in a hook are lost."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
