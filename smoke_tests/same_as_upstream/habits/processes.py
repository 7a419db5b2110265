# SPDX-License-Identifier: Apache-2.0
"""Processes that a step starts: forked, spawned, in pools, programs, servers, daemons."""

import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from multiprocessing import shared_memory
from typing import Any

from .habit import BETTER, habit

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
ENDS_AS_ASKED = BETTER + "a forked child ends as its program says"
ENDS_THEM = BETTER + "the end of a session ends what it has started"


def square(number: int) -> int:
    return number * number


def wait_for(seconds: float, ready: Any) -> None:
    ready.set()
    time.sleep(seconds)


def wait_unless_told(ready: Any) -> None:
    """A child with handlers of its own."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(41))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ready.set()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        os._exit(42)


def child(context, target, *arguments, send=0, code=0):
    """Run a child to its end, or send it a signal; it must have this exit code."""
    ready = [context.Event()] if send else []
    process = context.Process(target=target, args=(*arguments, *ready))
    process.start()
    if send:
        ready[0].wait(10)
        time.sleep(0.2)
        os.kill(process.pid, send)
    process.join(4)
    if process.exitcode != code:
        raise RuntimeError(f"the child has exit code {process.exitcode}, not {code}")
    return code


class Habits:
    @habit(steps=("go", "go"), ours=ENDS_AS_ASKED)
    def forked_deadline(self, how):
        """A forked child that grades, and is terminated at its deadline."""
        return child(FORK, wait_for, 60, send=signal.SIGTERM, code=-15)

    @habit(ours=ENDS_AS_ASKED)
    def forked_interrupted(self, how):
        """A forked child that is interrupted, as by Ctrl-C."""
        return child(FORK, wait_for, 60, send=signal.SIGINT, code=1)

    def forked_with_handlers(self, how):
        """Forked children with handlers of SIGTERM and SIGINT of their own."""
        cases = ((signal.SIGTERM, 41), (signal.SIGINT, 42))
        return [child(FORK, wait_unless_told, send=sent, code=code) for sent, code in cases]

    @habit(ours=ENDS_AS_ASKED)
    def forked_exit(self, how):
        """Forked children that end by `sys.exit`, by an error, and by returning."""
        cases = ((sys.exit, 0, 0), (sys.exit, 7, 7), (int, "x", 1), (square, 2, 0))
        return [child(FORK, do, number, code=code) for do, number, code in cases]

    @habit(ours=ENDS_AS_ASKED, unsteady=True)
    def forked_after_logging(self, how):
        """A forked child, and a pool, of a step that has logged and started a thread."""
        logging.getLogger().warning("graded")
        threading.Thread(target=print).start()
        with FORK.Pool(1) as pool:
            return [child(FORK, square, 2), pool.map(square, [3])]

    @habit(steps=("go", "go"), ours=ENDS_AS_ASKED)
    def bare_fork_sys_exits(self, how):
        """A child by `os.fork` that ends by `sys.exit`, in the step."""
        pid = os.fork()
        if pid == 0:
            sys.exit(6)
        for _ in range(50):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return "ended"
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise TimeoutError("the child does not end")

    def fork_and_pipe(self, how):
        """A child by `os.fork` that answers through a pipe."""
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(writing, b"from the child")
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(pid, 0)
        return said

    def waits_for_any(self, how):
        """A step that waits for any child by `os.wait()`."""
        if (pid := os.fork()) == 0:
            os._exit(9)
        while True:
            done, status = os.wait()
            if done == pid:
                return os.waitstatus_to_exitcode(status)

    @habit(ours=ENDS_AS_ASKED, unsteady=True)
    def fork_pool(self, how):
        """A pool of forked workers; the `with` block terminates them."""
        with FORK.Pool(2) as pool:
            return pool.map(square, range(5))

    @habit(steps=("go", "go"), also="reset close")
    def pool_for_the_session(self, how):
        """A pool that is kept from reset to close."""
        if how == "reset":
            self.pool = FORK.Pool(2)
        if how == "close":
            self.pool.terminate()
            return self.pool.join()
        return self.pool.apply(square, (7,))

    def spawned_process(self, how):
        """Spawned children: one returns, one exits, one is terminated."""
        stopped = child(SPAWN, wait_for, 60, send=signal.SIGTERM, code=-15)
        return [child(SPAWN, square, 2), child(SPAWN, sys.exit, 7, code=7), stopped]

    @habit(alone=True, shared="same", isolated=ENDS_THEM)
    def fork_server(self, how):
        """A child of multiprocessing's fork server, which stays."""
        return child(multiprocessing.get_context("forkserver"), square, 3)

    def executor(self, how):
        """A `ProcessPoolExecutor`."""
        with concurrent.futures.ProcessPoolExecutor(2) as pool:
            return list(pool.map(square, range(3)))

    def broken_executor(self, how):
        """A `ProcessPoolExecutor` whose worker exits."""
        with concurrent.futures.ProcessPoolExecutor(1) as pool:
            with contextlib.suppress(concurrent.futures.BrokenExecutor):
                pool.submit(os._exit, 1).result()
        return how

    def queues(self, how):
        """A child with a queue, and a manager."""
        queue = FORK.Queue()
        process = FORK.Process(target=queue.put, args=("from the child",))
        process.start()
        said = queue.get(timeout=10)
        process.join()
        with FORK.Manager() as manager:
            shared = manager.dict(a=1)
            return [said, dict(shared)]

    def shared_memory(self, how):
        """A block of shared memory that a child writes."""
        block = shared_memory.SharedMemory(create=True, size=16)
        try:
            process = FORK.Process(target=block.buf.__setitem__, args=(0, 7))
            process.start()
            process.join()
            return block.buf[0]
        finally:
            block.close()
            block.unlink()

    def programs(self, how):
        """Programs by `subprocess.run`, `os.system` and `os.popen`."""
        done = subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True)
        with os.popen("echo there") as pipe:
            return [done.stdout, os.system("exit 3"), pipe.read()]

    def program_at_deadline(self, how):
        """A program that `subprocess.run` kills at its deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "60"], timeout=0.3, check=False)
            return "not killed"
        return how

    def program_group(self, how):
        """A shell in a session of its own, whose group is killed."""
        process = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
        os.killpg(process.pid, signal.SIGTERM)
        return process.wait(10)

    def program_reads_input(self, how):
        """A program that inherits standard input and reads it."""
        return subprocess.run(["cat"], stdout=subprocess.PIPE, text=True, check=True).stdout

    def terminal(self, how):
        """A shell on a pseudo terminal, as terminals for agents have it."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.execvp("sh", ["sh", "-c", "test -t 0 && echo a terminal"])
        said = b""
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 1000):
                said += part
        os.close(terminal)
        return [said.decode().split(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]

    @habit(steps=("go", "go"), also="reset close")
    def server_of_its_own(self, how):
        """A child server for the session, asked in each step and ended by `close()`."""
        if how == "reset":
            command = [sys.executable, "-um", "http.server", "0", "--bind", "127.0.0.1"]
            self.server = subprocess.Popen(command, stdout=-1, stderr=-3, text=True)
            port = self.server.stdout.readline().split()[5]
            self.address = f"http://127.0.0.1:{port}"
        if how == "close":
            self.server.terminate()
            return self.server.wait(10)
        with urllib.request.urlopen(self.address) as answer:
            return answer.status

    @habit(isolated=ENDS_THEM)
    def leaves_program(self, how):
        """A program that a step starts and nothing ends."""
        subprocess.Popen(["sleep", "600"])
        return how

    @habit(isolated=ENDS_THEM)
    def leaves_daemon(self, how):
        """A program in a session of its own that nothing ends, as a browser."""
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        return how

    @habit(ours=ENDS_THEM, unsteady=True)
    def leaves_forked_child(self, how):
        """A daemonic child that a step forks and nothing ends."""
        ready = FORK.Event()
        FORK.Process(target=wait_for, args=(600, ready), daemon=True).start()
        return ready.wait(10)

    @habit(alone=True, at_import="import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    def ignores_its_children(self, how):
        """SIGCHLD ignored at import, so that children need not be reaped."""
        done = subprocess.run(["sh", "-c", "echo hello"], capture_output=True, text=True)
        return [done.stdout, signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN]

    @habit(
        alone=True,
        at_import="""
            import subprocess
            import habits.processes
            habits.processes.cat = subprocess.Popen(["cat"], stdin=-1, stdout=-1, text=True)
        """,
    )
    def child_at_import(self, how):
        """A program that the import starts, and steps talk to."""
        cat: Any = globals()["cat"]
        print(how, file=cat.stdin, flush=True)
        return cat.stdout.readline()
