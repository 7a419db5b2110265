# SPDX-License-Identifier: Apache-2.0
"""Environments that do what a test needs, as a module to be written beside the host.

A gate is a named pipe: opening it for reading waits for the test to open it for writing, so that a
test and a call inside the host meet without sleeping.
"""

SAMPLES = '''
import asyncio, ctypes, os, random, signal, sqlite3, subprocess, sys, threading
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

def pass_gate(name):
    """Tell the test that we are here, and wait until it lets us go."""
    with open(name + ".in", "w"):
        pass
    with open(name + ".out") as gate:
        gate.read()

class Do(Action):
    what: str = "count"
    gate: str = ""

class Seen(Observation):
    text: str = ""

class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")

class Counter(Environment[Do, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    RESET_FIRST = False

    def __init__(self):
        self._state = State(episode_id="none")
        self._thread = threading.get_ident()

    def reset(self, seed=None, episode_id=None):
        self._state = State(episode_id=episode_id or "fresh")
        return Seen(text=f"seed {seed}")

    def step(self, action, timeout_s=None):
        self._state.step_count += 1
        return Seen(text=getattr(self, "do_" + action.what)(action) or action.what)

    def do_count(self, action):
        return str(self._state.step_count)

    def do_device(self, action):
        return os.environ.get("CUDA_VISIBLE_DEVICES", "none")

    def do_raise(self, action):
        raise RuntimeError("the level file is missing")

    def do_wrong_field(self, action):
        return Seen(text=["no", "text"])

    def do_raise_half_a_pair(self, action):
        raise RuntimeError("half \\ud800")

    def do_raise_without_a_text(self, action):
        raise Speechless

    def do_exit(self, action):
        sys.exit(4)

    def do_stop_iteration(self, action):
        next(iter(()))

    def do_wait(self, action):
        pass_gate(action.gate)

    def do_wait_then_hold(self, action):
        pass_gate(action.gate)
        self.do_hold(action)

    def do_hold(self, action):
        """Hold the interpreter, as C code does that does not let it go."""
        ctypes.PyDLL(None).read(os.pipe()[0], bytes(1), 1)

    def do_leave(self, action):
        """Leave a program behind that holds memory, as a child or as a daemon."""
        code = "block = bytearray(b'x') * (24 << 20); print(1, flush=True); input()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True)
        process.stdout.readline()
        self.left = process
        return str(process.pid)

    def do_same_thread(self, action):
        return str(threading.get_ident() == self._thread)

    def do_thread_name(self, action):
        return threading.current_thread().name

    def do_print(self, action):
        print("said by a step")

    def do_pid(self, action):
        return str(os.getpid())

    def do_kill(self, action):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_segfault(self, action):
        os.kill(os.getpid(), signal.SIGSEGV)

    def do_terminate(self, action):
        os.kill(os.getpid(), signal.SIGTERM)

    def do_exit_at_once(self, action):
        os._exit(5)

    def do_random(self, action):
        return str(random.random())

    def do_eat(self, action):
        self._eaten = [os.urandom(2**20) for _ in range(200)]
        threading.Event().wait()

    @property
    def state(self):
        return self._state

    def close(self):
        with open("closed.log", "a") as log:
            log.write("closed\\n")

class Stopping(Counter):
    """Stops its process in the very turn of the loop in which a slot becomes free."""

    def do_stop_when_free(self, action):
        from openenvd.env_host.sessions.table import SessionTable
        release = SessionTable.release

        def release_and_stop(table, session, **how):
            ending = release(table, session, **how)
            table.registry.on_change.__self__._beat()
            os.kill(os.getpid(), signal.SIGSTOP)
            return ending

        SessionTable.release = release_and_stop

class Dictionary(Counter):
    def step(self, action):
        return {"text": "no observation"}

class Single(Counter):
    SUPPORTS_CONCURRENT_SESSIONS = False

class Sqlite(Counter):
    """Bound to its thread, as SQLite connections are."""

    def __init__(self):
        super().__init__()
        self._db = sqlite3.connect(":memory:")
        self._db.execute("create table steps (n)")

    def do_count(self, action):
        self._db.execute("insert into steps values (1)")
        return str(self._db.execute("select count(*) from steps").fetchone()[0])

    @property
    def state(self):
        (count,) = self._db.execute("select count(*) from steps").fetchone()
        return State(episode_id="db", step_count=count)

    def close(self):
        self._db.close()
        super().close()

class OneThread(Counter):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True

class ThreadSafe(Counter):
    THREAD_SAFE = True

class Async(Counter):
    async def reset_async(self, seed=None, episode_id=None, **kwargs):
        return Seen(text=f"async {sorted(kwargs)}")

    async def step_async(self, action, timeout_s=None, **kwargs):
        if action.what == "forever":
            try:
                await asyncio.Event().wait()
            finally:
                with open(action.gate, "w"):
                    pass
        if action.what == "cancel":
            raise asyncio.CancelledError
        if action.what == "exit":
            sys.exit(4)
        if action.what == "time_out":
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()
            except TimeoutError:
                return Seen(text=asyncio.current_task().get_name()[:4])
        return Seen(text=threading.current_thread().name)

class SlowToClose(Single):
    def close(self):
        pass_gate("closing")
        super().close()

class Broken(Counter):
    def __init__(self):
        raise OSError("no licence")

class SlowToCreate(Counter):
    def __init__(self):
        pass_gate("creating")
        super().__init__()

class Plain:
    """No base class, no types: whatever has reset and step."""

    def reset(self):
        return Seen(text="plain")

    def step(self, action):
        return Seen(text=str(action.anything))

    state = {"here": True}

class NotOne:
    pass

if "FAIL_SHARDS" in os.environ:
    os.register_at_fork(after_in_child=lambda: os._exit(9))

if "NO_CGROUPS" in os.environ:
    from openenvd.system.memory import cgroups

    cgroups.locate = lambda *_: None

if "FAIL_SESSIONS" in os.environ:
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    os.register_at_fork(after_in_child=lambda: len(forks) > 1 and os._exit(9))

def refuse(module, name, refused):
    """Make the calls of a function fail that have these numbers, as if no process had room."""
    numbers, fork = iter(range(1, 1000)), getattr(module, name)
    refused = [int(number) for number in refused.split()]

    def fork_if_there_is_room(*run):
        if next(numbers) in refused:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork(*run)

    setattr(module, name, fork_if_there_is_room)

if "NO_ROOM" in os.environ:
    from openenvd.env_host.supervisor import spawn

    refuse(spawn.os, "fork", os.environ["NO_ROOM"])  # the host's own view of `os`

if "NO_COPIES" in os.environ:
    from openenvd.system.process import forking

    refuse(forking, "fork_sibling", os.environ["NO_COPIES"])

class SlowTools(Counter):
    """Its tools never answer."""

    def __init__(self):
        super().__init__()
        self.mcp_client = self

    def is_connected(self):
        return True

    async def list_tools(self):
        await asyncio.Event().wait()

if "ONE_SHOT" in os.environ:
    from openenvd.env_host.sessions import table

    table.MAX_ONE_SHOT = int(os.environ["ONE_SHOT"])

if "PATIENCE" in os.environ:
    from openenvd.env_host.sessions import remote_session
    from openenvd.env_host.supervisor import shard_policies

    shard_policies.PATIENCE_SECONDS = float(os.environ["PATIENCE"])
    remote_session.PATIENCE_SECONDS = float(os.environ["PATIENCE"])

if "SPARES" in os.environ:
    from openenvd.env_host.sessions import remote_session

    remote_session.SPARES = int(os.environ["SPARES"])

if "LINGER" in os.environ:
    from openenvd.env_host.supervisor import shard_policies

    shard_policies.LINGER_SECONDS = float(os.environ["LINGER"])
'''

# A class whose import leaves a thread running.
THREADED = """
import threading
from samples import Counter

threading.Thread(target=threading.Event().wait, name="ticker", daemon=True).start()

class Threaded(Counter):
    pass
"""

# Environments with tools, each session with its own server.
TOOLS = """
from types import SimpleNamespace as Tool
from plain import Bare

class Server:
    def __init__(self):
        self.count = 0
    def functions(self):
        def count():
            self.count += 1
            return {"count": self.count}
        return [count]
    async def get_tools(self):
        return {
            f.__name__: Tool(name=f.__name__, description="", parameters={}, fn=f)
            for f in self.functions()
        }

class Tools(Bare):
    def __init__(self):
        self.mcp_server = Server()
"""

PLAIN = '''
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

class Do(Action):
    gate: str = ""
    how: str = ""
    signals: list[int] = []

class Seen(Observation):
    steps: int = 0
    text: str = ""
    pids: list[int] = []
    found: dict = {}

class Bare(Environment[Do, Seen, State]):
    """Nothing in its code is bound to a thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    RESET_FIRST = False

    def reset(self, **kwargs):
        return Seen()

    def step(self, action, **kwargs):
        return Seen()

    @property
    def state(self):
        return State()

class Plain(Bare):
    def __init__(self):
        self._state = State()

    def step(self, action):
        self._state.step_count += 1
        if action.gate:
            with open(action.gate + ".in", "w"):
                pass
            with open(action.gate + ".out") as gate:
                gate.read()
        return Seen(steps=self._state.step_count)

    @property
    def state(self):
        return self._state
'''
