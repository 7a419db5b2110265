# SPDX-License-Identifier: Apache-2.0
"""What a step or an import changes in its process: folder, streams, limits, signals, modules."""

import builtins
import gc
import io
import locale
import logging
import os
import queue
import random
import resource
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from .habit import ON_PURPOSE, habit

STATE = ON_PURPOSE + "module state"
COUNTS = {"steps": 0}
HEARD: queue.SimpleQueue[int] = queue.SimpleQueue()


class Habits:
    @habit(steps=("change", "read"), also="close")
    def changes_folder(self, how):
        """`os.chdir` in a step, and a file by a relative path in the next."""
        if how == "change":
            os.chdir(tempfile.mkdtemp())
            Path("note.txt").write_text("here")
        if how == "close":
            return os.chdir(Path(__file__).parents[1])
        return Path("note.txt").read_text()

    @habit(files={"data/level.txt": "one"})
    def relative_files(self, how):
        """Files of the project by relative paths, by `__file__`, and one that is written."""
        Path("played.txt").write_text("yes")
        beside = Path(__file__).parents[1] / "data" / "level.txt"
        return [Path("data/level.txt").read_text(), beside.read_text(), Path.cwd().name]

    @habit(steps=("set", "get"))
    def umask(self, how):
        """A umask that a step sets."""
        if how == "set":
            os.umask(0o077)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file")
            path.touch()
            return path.stat().st_mode & 0o777

    @habit(
        at_import="""
        import os, habits.process_state
        habits.process_state.UMASK = os.umask(0)
        os.umask(habits.process_state.UMASK)
        """
    )
    def umask_at_import(self, how):
        """The umask that the project is imported with: that of the user's shell."""
        return globals()["UMASK"]

    @habit(at_import="import locale; locale.setlocale(locale.LC_ALL, 'C.UTF-8')")
    def locale(self, how):
        """A locale that the import sets."""
        return [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()]

    def prints(self, how):
        """A step that prints much, also without a line's end and not as text."""
        for number in range(20000):
            print("line", number)
        sys.stdout.write("no end")
        sys.stdout.buffer.write(b"\xff\xfe")
        sys.stderr.write("\x1b[31mred")
        return how

    @habit(steps=("replace", "read"), also="close")
    def replaces_stdout(self, how):
        """Standard output replaced in a step, and read in the next."""
        if how == "close":
            sys.stdout = sys.__stdout__
            return None
        if how == "replace":
            sys.stdout = io.StringIO()
        print(how)
        return sys.stdout.getvalue()

    def redirects_descriptors(self, how):
        """Standard output caught at its descriptor."""
        kept = os.dup(1)
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 1)
            os.system("echo caught")
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            return file.read().decode()

    @habit(
        at_import="""
            import logging
            logging.basicConfig(filename="run.log", level="DEBUG", force=True, format="%(message)s")
        """,
    )
    def logging(self, how):
        """`logging.basicConfig` at import, with a file and `force`."""
        logging.getLogger("game").info("step %s", how)
        return Path("run.log").read_text().splitlines()[-1]

    @habit(at_import="import sys, threading; sys.setrecursionlimit(5000)")
    def recursion_limit(self, how):
        """A recursion limit that the import raises."""

        def depth(number: int) -> int:
            return number and 1 + depth(number - 1)

        return [sys.getrecursionlimit(), depth(3000)]

    def few_descriptors(self, how):
        """A limit of open files that a step lowers."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(7)[1]))
        with open(os.devnull) as file:
            return file.fileno() < 128

    @habit(at_import="import gc; gc.disable(); gc.set_threshold(5, 5, 5)")
    def collector(self, how):
        """The garbage collector disabled at import."""
        return [gc.isenabled(), gc.get_threshold()]

    @habit(
        at_import="""
            import signal
            import habits.process_state
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                signal.signal(number, lambda number, _: habits.process_state.HEARD.put(number))
        """,
        steps=("USR1", "USR2", "HUP"),
    )
    def own_signals(self, how):
        """Handlers of SIGUSR1, SIGUSR2 and SIGHUP that the import sets."""
        number = signal.Signals[f"SIG{how}"]
        os.kill(os.getpid(), number)
        return HEARD.get(timeout=3) == number

    @habit(
        at_import="import signal; signal.pthread_sigmask(0, [signal.SIGWINCH, signal.SIGALRM])",
    )
    def blocked_signals(self, how):
        """Signals that the import blocks."""
        return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    @habit(
        at_import="""
            import builtins
            opened = builtins.open
            builtins.open = lambda name, *more, **named: opened(name or "/none", *more, **named)
        """,
    )
    def patched_builtins(self, how):
        """`open` patched at import, as sandboxes do."""
        return builtins.open("").read()

    @habit(at_import="import time; time.time = lambda: 1_000_000.0")
    def patched_time(self, how):
        """`time.time` patched at import, as for a simulated clock."""
        return time.time()

    @habit(at_import="import socket; socket.setdefaulttimeout(0.5)")
    def socket_timeout(self, how):
        """`socket.setdefaulttimeout` at import."""
        time.sleep(1)
        return socket.getdefaulttimeout()

    @habit(alone=True, at_import="import gevent.monkey; gevent.monkey.patch_all()")
    def gevent(self, how):
        """gevent's patches at import, and greenlets in a step."""
        import gevent

        return len(gevent.joinall([gevent.spawn(time.sleep, 0.1)], timeout=5))

    @habit(isolated=STATE)
    def module_state(self, how):
        """A counter of the module, which all sessions share."""
        COUNTS["steps"] += 1
        return COUNTS["steps"]

    @habit(at_import="import random; random.seed(7)", ours=ON_PURPOSE + "random numbers")
    def seed_at_import(self, how):
        """Random numbers of a seed that the import sets."""
        return random.random()

    @habit(steps=("go", "go"), options={"seed": 3}, also="reset")
    def seed_in_reset(self, how):
        """Random numbers of a seed that the reset sets."""
        if how == "reset":
            random.seed(self.options["seed"])
        return random.random()

    @habit(
        at_import="import os; os.environ['PID_AT_IMPORT'] = str(os.getpid())",
        ours=ON_PURPOSE + "pids",
    )
    def pid_at_import(self, how):
        """A file named after the pid that the import has seen."""
        return os.environ["PID_AT_IMPORT"] == str(os.getpid())

    def closes_everything(self, how):
        """`os.closerange` over all descriptors from 3 on, as daemons do in a child."""
        if (pid := os.fork()) == 0:
            os.closerange(3, 4096)
            os._exit(0)
        return os.waitpid(pid, 0)[1]
