# SPDX-License-Identifier: Apache-2.0
"""Threads, event loops, databases and C libraries in synchronous steps."""

import asyncio
import concurrent.futures
import contextvars
import faulthandler
import signal
import sqlite3
import threading
import time
from typing import Any

from .coroutines import soon
from .habit import BETTER, habit
from .processes import FORK

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
RANG = threading.Event()
POOL = concurrent.futures.ThreadPoolExecutor(1)


def multiply(matrix: Any) -> float:
    return float((matrix @ matrix).sum())


class Habits:
    @habit(steps=("go", "go"), also="reset close")
    def background_thread(self, how):
        """A daemon thread that lives from reset to close."""
        if how == "reset":
            self.stop = threading.Event()
            self.thread = threading.Thread(target=self.stop.wait, daemon=True)
            self.thread.start()
        if how == "close":
            self.stop.set()
            self.thread.join()
        return self.thread.is_alive()

    def endless_thread(self, how):
        """A thread, no daemon, that nothing ends."""
        threading.Thread(target=time.sleep, args=(600,)).start()
        return how

    @habit(steps=("start", "wait"))
    def timer(self, how):
        """A timer that a step starts and the next one waits for."""
        if how == "start":
            self.rang = threading.Event()
            threading.Timer(0.2, self.rang.set).start()
            return how
        return self.rang.wait(10)

    @habit(steps=("go", "go"), also="reset")
    def one_thread(self, how):
        """State of a thread (`threading.local`) that all calls of a session find."""
        if how == "reset":
            self.local = threading.local()
            self.local.steps = 0
        self.local.steps += 1
        return self.local.steps

    @habit(steps=("set", "get"))
    def context_variables(self, how):
        """A context variable that the next step reads."""
        if how == "set":
            WHO.set("me")
        return WHO.get()

    @habit(steps=("go", "go"), also="reset close")
    def sqlite(self, how):
        """An SQLite connection, which belongs to the thread that has made it."""
        if how == "reset":
            self.database = sqlite3.connect(":memory:")
            self.database.execute("create table moves (name text)")
        if how == "close":
            return self.database.close()
        self.database.execute("insert into moves values (?)", (how,))
        return self.database.execute("select count(*) from moves").fetchone()

    @habit(
        at_import="""
            import sqlite3
            import habits.threads
            habits.threads.DATABASE = sqlite3.connect("moves.db", check_same_thread=False)
            habits.threads.DATABASE.execute("create table if not exists moves (name text)")
        """,
    )
    def sqlite_at_import(self, how):
        """One SQLite connection for all sessions, made at import and guarded by a lock."""
        database = globals()["DATABASE"]
        database.execute("insert into moves values (?)", (how,))
        database.commit()
        return database.execute("select count(*) from moves").fetchone()

    @habit(steps=("go", "go"))
    def runs_loop(self, how):
        """`asyncio.run` in a step."""
        return asyncio.run(soon(how))

    @habit(steps=("go", "go"), also="reset close")
    def loop_of_its_own(self, how):
        """An event loop that is kept from reset to close."""
        if how == "reset":
            self.loop = asyncio.new_event_loop()
        if how == "close":
            return self.loop.close()
        return self.loop.run_until_complete(soon(how))

    def asks_for_loop(self, how):
        """`asyncio.get_event_loop`, with the usual fall-back."""
        try:
            loop = asyncio.get_event_loop()
        except RuntimeError:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        return [loop.is_running(), loop.run_until_complete(soon(how))]

    @habit(steps=("go", "go"), also="reset close")
    def loop_in_thread(self, how):
        """A loop that runs in a thread of its own, as those of browsers."""
        if how == "reset":
            self.loop = asyncio.new_event_loop()
            self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
            self.thread.start()
        if how == "close":
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            return self.loop.close()
        return asyncio.run_coroutine_threadsafe(soon(how), self.loop).result(10)

    def thread_pool(self, how):
        """A pool of threads, with a call that is never waited for."""
        pool = concurrent.futures.ThreadPoolExecutor(4)
        pool.submit(time.sleep, 1)
        return list(pool.map(str.upper, ["a", "b"]))

    @habit(at_import="import habits.threads; habits.threads.POOL.submit(int).result()")
    def pool_at_import(self, how):
        """A pool whose thread the import has started, and steps use."""
        return POOL.submit(str.upper, how).result(10)

    def handler_in_step(self, how):
        """A step that sets a signal's handler, which only the main thread may."""
        signal.signal(signal.SIGALRM, lambda *_: None)

    @habit(
        at_import="""
            import signal
            import habits.threads
            signal.signal(signal.SIGALRM, lambda *_: habits.threads.RANG.set())
        """,
    )
    def alarm(self, how):
        """A step with a deadline by `signal.alarm`, whose handler the import has set."""
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return RANG.wait(10)

    def watchdog(self, how):
        """`faulthandler.dump_traceback_later` around a step."""
        faulthandler.dump_traceback_later(60)
        try:
            return how
        finally:
            faulthandler.cancel_dump_traceback_later()

    @habit(steps=("matrix", "array", "scalar"))
    def numpy(self, how):
        """NumPy with BLAS on several threads, and arrays in the observation."""
        import numpy as np

        if how == "array":
            return {"board": np.eye(2)}
        if how == "scalar":
            return {"score": np.float32(0.5), "moves": np.int64(3)}
        matrix = np.ones((400, 400))
        return float((matrix @ matrix).sum())

    @habit(ours=BETTER + "upstream's server sometimes hangs in the child", unsteady=True)
    def numpy_after_fork(self, how):
        """BLAS in the step, then in a forked child."""
        import numpy as np

        matrix = np.ones((400, 400))
        with FORK.Pool(1) as pool:
            return [float((matrix @ matrix).sum()), pool.apply(multiply, (matrix,))]
