# SPDX-License-Identifier: Apache-2.0
"""Steps, resets, constructors and ends that raise, exit, wait for a terminal, or take a while."""

import asyncio
import ctypes
import os
import resource
import signal
import sys
import threading
import time

from .habit import BETTER, habit

OTHERS_LIVE = BETTER + "its process alone ends, and the client is told why"


class Habits:
    @habit(steps=("raise", "go on"))
    def raises(self, how):
        """A step that raises; the next one is answered."""
        if how == "raise":
            raise ValueError("no such move: é")
        return how

    @habit(also="reset")
    def raises_in_reset(self, how):
        """A reset that raises."""
        if how == "reset":
            raise FileNotFoundError(2, "No such file or directory", "/level.json")

    @habit(steps=("none", "long", "bad"), ours=BETTER + "the error is named")
    def raises_without_text(self, how):
        """An error without a text, one of 1 MB, and one whose text fails."""
        if how == "none":
            raise RuntimeError
        if how == "long":
            raise RuntimeError("x" * 1000000)

        class BadError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise BadError

    @habit(steps=("deep", "deep"))
    def recursion(self, how):
        """A step that recurses without an end."""
        return Habits.recursion.call(self, how)

    @habit(ours=BETTER + "the client gets an error instead of no answer")
    def stops_iterating(self, how):
        """A step that lets a StopIteration escape."""
        return next(iter(()))

    @habit(ours=BETTER + "the session goes on")
    def cancelled(self, how):
        """A step that raises CancelledError."""
        raise asyncio.CancelledError

    def reads_terminal(self, how):
        """`input()` in a step."""
        return input("continue? ")

    @habit(steps=("debug", "go on"))
    def debugger(self, how):
        """A step with a forgotten `breakpoint()`."""
        if how == "debug":
            breakpoint()
        return how

    def blocks_for_a_while(self, how):
        """A step that sleeps for two seconds."""
        time.sleep(2)
        return how

    @habit(also="close")
    def fails_in_close(self, how):
        """A `close()` that raises."""
        if how == "close":
            raise RuntimeError("already closed")
        return how

    @habit(also="close")
    def slow_close(self, how):
        """A `close()` that takes two seconds."""
        if how == "close":
            time.sleep(2)
        return how

    @habit(ours=OTHERS_LIVE)
    def exits(self, how):
        """`sys.exit` in a step."""
        sys.exit("the game is over")

    @habit(ours=OTHERS_LIVE)
    def interrupts(self, how):
        """A step that raises KeyboardInterrupt."""
        raise KeyboardInterrupt

    @habit(ours=OTHERS_LIVE)
    def exits_at_once(self, how):
        """`os._exit` in a step."""
        os._exit(3)

    @habit(also="close")
    def exits_in_close(self, how):
        """A `close()` that calls `sys.exit`."""
        if how == "close":
            sys.exit(0)
        return how

    @habit(ours=OTHERS_LIVE)
    def crashes(self, how):
        """A step that crashes in C code."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return ctypes.string_at(0)

    @habit(ours=OTHERS_LIVE)
    def kills_itself(self, how):
        """A step that kills its own process."""
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)

    # A container may take longer to start again than a session waits.
    @habit(shared=BETTER + "the server starts again", isolated=OTHERS_LIVE, unsteady=True)
    def kills_its_group(self, how):
        """A step that kills its process group."""
        os.killpg(0, signal.SIGKILL)
        time.sleep(5)

    @habit(ours=OTHERS_LIVE)
    def terminates_itself(self, how):
        """A step that sends SIGTERM to its own process."""
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        return how

    @habit(ours=OTHERS_LIVE)
    def interrupts_main(self, how):
        """A step that interrupts the main thread, as a watchdog does."""
        threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
        time.sleep(1)
        return how

    @habit(alone=True, also="begin", ours=BETTER + "the launch fails, with the error")
    def fails_to_begin(self, how):
        """A constructor that raises."""
        if how == "begin":
            raise RuntimeError("no licence")

    @habit(alone=True, also="begin")
    def slow_constructor(self, how):
        """A constructor that takes four seconds, as a model's."""
        if how == "begin":
            time.sleep(4)
        return how
