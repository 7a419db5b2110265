# SPDX-License-Identifier: Apache-2.0
"""Branches and checkpoints of sessions with processes of their own: by forking them."""

import random
import re
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from openenvd import client
from openenvd.system.memory.cgroups import GroupsBelow

from ..conftest import StartHost
from ..hosts import Client, Host, until, wait_until_exited
from . import test_branches
from .test_branches import attach, branch, step

MODULE = r"""
import asyncio, os, random, signal, socket, sqlite3, subprocess, sys, tempfile, threading, time
import multiprocessing.shared_memory, mmap
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

if "PATIENCE" in os.environ:
    from openenvd.env_host.sessions import remote_session

    remote_session.PATIENCE_SECONDS = float(os.environ["PATIENCE"])
    remote_session.SPARES = 0

if "SLOW_COPIES" in os.environ:
    os.register_at_fork(after_in_child=lambda: time.sleep(0.3))

asyncio.set_event_loop(asyncio.new_event_loop())  # as gradio does, and with it most projects

class Do(Action):
    by: int = 1
    how: str = ""

class Seen(Observation):
    at: int = 0
    drawn: float = 0.0
    read: str = ""
    pid: int = 0

class Forked(Environment[Do, Seen, State]):
    "Nothing copies it but a fork: it holds a lock, a closure, and the process's random numbers."

    def __init__(self):
        self.lock, self.at = threading.Lock(), 0
        self.add = lambda by: by
        self.held = []
        with open("numbers", "w") as file:
            file.write("0123456789")
        self.file = open("numbers")

    def reset(self, seed=None, episode_id=None, **kwargs):
        random.seed(seed)
        self.at, self.thread = 0, threading.get_ident()
        return Seen(pid=os.getpid())

    def step(self, action, timeout_s=None, **kwargs):
        assert self.thread == threading.get_ident()
        if action.how:
            self.held.append(getattr(self, "do_" + action.how)())
        with self.lock:
            self.at += self.add(action.by)
        read = self.file.read(1)
        return Seen(at=self.at, drawn=random.random(), read=read, pid=os.getpid())

    def do_threads(self):
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        return thread

    def do_children(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def do_sockets(self):
        return socket.socketpair()

    def do_files(self):
        return open("log", "a")

    def do_database(self):
        return sqlite3.connect(":memory:")

    def do_shared_state(self):
        return mmap.mmap(-1, 4096)

    def do_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_kill_group(self):
        os.killpg(0, signal.SIGKILL)

    def do_daemon(self):
        code = "import os, time; os.fork() and os._exit(0); os.setsid(); print(1, flush=True)"
        command = [sys.executable, "-c", code + "; time.sleep(600)"]
        program = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert program.wait() == 0 and program.stdout.readline()
        return program

    def do_eat(self):
        self.held.append([os.urandom(2**20) for _ in range(200)])
        threading.Event().wait()

    def do_raise(self):
        raise LookupError("no such door")

    def do_hang(self):
        threading.Event().wait()

    @property
    def state(self):
        return State(step_count=self.at)

    def close(self):
        with open("closed", "a") as file:
            file.write(".")

    def do_hang_at_close(self):
        self.close = threading.Event().wait

class AsyncForked(Forked):
    def do_task(self):
        async def count():
            while True:
                await asyncio.sleep(0.001)
                self.at += 1
        self.task = asyncio.create_task(count(), name="counting")

    def do_cancel(self):
        self.task.cancel()

    async def reset_async(self, seed=None, episode_id=None, **kwargs):
        return self.reset(seed)

    async def step_async(self, action, timeout_s=None, **kwargs):
        await asyncio.sleep(0)
        return self.step(action)
"""


WITHOUT_CGROUPS = """
from openenvd.system.memory import cgroups

cgroups.locate = lambda *_: None
"""
REASONS = ("threads", "children", "sockets", "files", "shared_state")


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> None:
    (tmp_path / "forked.py").write_text(MODULE)


@pytest.fixture
def host(serve: StartHost) -> Host:
    return serve("forked:Forked", max_sessions=6, env={"PATIENCE": "10"})


@pytest.mark.parametrize("name", ["Forked", "AsyncForked"])
def test_forked_branches_continue_as_their_parent_would(serve: StartHost, name: str) -> None:
    host = serve(f"forked:{name}", max_sessions=6)
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {"seed": 7})
        before = step(parent, 2)
        answer = parent.ask("branch", {"count": 3})["data"]
        assert answer.get("by") == "fork", answer
        ids = [each["session_id"] for each in answer["branches"]]
        clients = [parent, *(stack.enter_context(attach(host, each)) for each in ids)]
        answers = [step(each) for each in clients]
        pids = {each.pop("pid") for each in answers}
        assert len(pids) == 4
        assert before["pid"] in pids
        assert answers == answers[:1] * 4
        assert (answers[0]["at"], answers[0]["read"]) == (3, "1")
        step(clients[1], 10)
        assert [step(each)["at"] for each in clients] == [4, 14, 4, 4]
        assert parent.ask("state")["data"]["step_count"] == 4
        [grandchild] = branch(clients[1])
        parent.leave()
        with attach(host, grandchild) as client:
            assert step(client)["at"] == 15
        assert step(clients[2])["at"] == 5
    host.emptied()


@pytest.mark.parametrize(("isolate", "tier"), [(False, "copy"), (True, "fork")])
def test_sessions_of_the_sdk_branch_and_return_on_the_server(
    serve: StartHost, tmp_path: Path, isolate: bool, tier: str
) -> None:
    (tmp_path / "walks.py").write_text(test_branches.PLAIN)
    host = serve("walks:Walk", isolate=isolate, max_sessions=8)
    with client.Session(f"http://127.0.0.1:{host.port}") as session:
        session.reset(seed=7)
        seen = session.step({"by": 2})
        node = session.checkpoint()
        assert (session.branched_by, session.branch_refusal) == (tier, None)
        ats = []
        for branch, by in zip(session.branch(3), (1, 2, 3), strict=True):
            with branch:
                ats.append(branch.step({"by": by}).observation["at"])
        assert ats == [3, 4, 5]
        session.step({"by": 50})
        assert session.restore(node).observation == seen.observation
        assert session.step({"by": 1}).observation["at"] == 3
    host.emptied()


def test_seeds_set_the_random_numbers_of_the_process_too(host: Host) -> None:
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {"seed": 7})
        ids = branch(parent, seeds=[5, 6, 5])
        drawn = [step(stack.enter_context(attach(host, each)))["drawn"] for each in ids]
        assert drawn[0] == drawn[2] == random.Random(5).random()
        assert drawn[1] == random.Random(6).random()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("database", "files"),
        *((e, e) for e in ["threads", "children", "sockets", "files", "shared_state"]),
    ],
)
@pytest.mark.parametrize("is_bare", [False, True])
def test_what_a_copy_would_share_or_lack_forbids_a_fork(
    host: Host, how: str, reason: str, is_bare: bool
) -> None:
    with host.open() as client:
        client.ask("reset", {})
        if is_bare:
            assert branch(client)
        client.ask("step", {"how": how})
        told = client.ask("branch", {})["data"]
        assert (told["code"], told["reason"]) == ("BRANCH_UNSUPPORTED", reason), told
        assert told["found"]
        assert step(client)["at"] == 2


def test_slots_of_forked_branches_are_the_hosts(host: Host) -> None:
    with host.open() as parent, host.open() as other:
        parent.ask("reset", {})
        other.ask("reset", {})
        assert parent.ask("branch", {"count": 5})["data"]["code"] == "CAPACITY_REACHED"
        assert len(branch(parent, count=4, ttl_s=0.5)) == 4
        assert other.ask("branch", {})["data"]["code"] == "CAPACITY_REACHED"
        with host.open() as refused:
            assert refused.receive()["data"]["code"] == "CAPACITY_REACHED"
        host.until(lambda capacity: capacity["sessions"] == 2)
        assert len(branch(other, count=4)) == 4
        other.ask("checkpoint")
        host.until(lambda capacity: (capacity["branches"], capacity["checkpoints"]) == (4, 1))
        assert 'openenvd_checkpoints{environment="sample"} 1' in host.http("GET", "/metrics")[1]
    host.emptied()


def test_a_killed_branch_harms_neither_parent_nor_siblings_nor_does_a_killed_parent(
    host: Host,
) -> None:
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {})
        one, other = (stack.enter_context(attach(host, e)) for e in branch(parent, count=2))
        for each in (one, parent):
            each.send("step", {"how": "kill"})
            told, _ = each.last_word()
            assert told["data"]["code"] == "SESSION_ERROR"
            assert "has ended" in told["data"]["message"]
        assert step(other)["at"] == 1
        with attach(host, *branch(other)) as grandchild:
            assert step(grandchild)["at"] == 2
    host.emptied()


@pytest.mark.parametrize("is_killed", [False, True])
def test_branches_outlive_their_parent_before_they_have_run(
    serve: StartHost, is_killed: bool
) -> None:
    with ExitStack() as stack:
        host = serve("forked:Forked", isolate=True, max_sessions=10, env={"SLOW_COPIES": "1"})
        with host.open() as parent:
            parent.ask("reset", {})
            pid = step(parent)["pid"]
            ids = branch(parent, count=8)
            if is_killed:
                psutil.Process(pid).kill()
        clients = [stack.enter_context(attach(host, each)) for each in ids]
        assert [step(client)["at"] for client in clients] == [2] * 8


def test_a_signal_to_its_own_process_group_ends_one_branch_alone(host: Host) -> None:
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {})
        one, other = (stack.enter_context(attach(host, e)) for e in branch(parent, count=2))
        one.send("step", {"how": "kill_group"})
        assert "was killed by SIGKILL" in one.last_word()[0]["data"]["message"]
        assert step(other)["at"] == step(parent)["at"] == 1
    host.emptied()


def test_copies_of_copies_have_as_many_descriptors_and_are_looked_at(host: Host) -> None:
    def fds(client: Client) -> int:
        return psutil.Process(step(client)["pid"]).num_fds()

    with host.open() as parent:
        parent.ask("reset", {})
        with attach(host, *branch(parent)) as client:
            before = fds(client)
            for _ in range(5):
                node = client.ask("checkpoint")["data"]["checkpoint_id"]
                client.ask("restore", {"checkpoint_id": node})
            assert fds(client) == before
            for how in ("files", "sockets"):
                with attach(host, *branch(client)) as other:
                    other.ask("step", {"how": how})
                    assert other.ask("branch", {})["data"].get("reason") == how


@pytest.mark.parametrize("how", ["closed", "replaced", "killed", "hanging"])
def test_programs_end_with_their_branch_or_replaced_state(serve: StartHost, how: str) -> None:
    env = {"PATIENCE": "1"}
    host = serve("forked:Forked", max_sessions=6, step_timeout_seconds=3.0, env=env)
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {})
        one, other = (stack.enter_context(attach(host, e)) for e in branch(parent, count=2))
        [grandchild] = (stack.enter_context(attach(host, e)) for e in branch(one))
        node = one.ask("checkpoint")["data"]
        own = psutil.Process(step(one)["pid"])
        for program in ("children", "daemon"):
            assert one.ask("step", {"how": program})["type"] == "observation"
        programs = own.children(recursive=True)
        assert len(programs) == 2
        if how == "replaced":
            one.ask("restore", {"checkpoint_id": node["checkpoint_id"]})
            assert step(one)["at"] == 1
        elif how == "closed":
            one.leave()
        else:
            one.send("step", {"how": {"killed": "kill", "hanging": "hang"}[how]})
            one.last_word()
        wait_until_exited(programs)
        assert [step(each)["at"] for each in (parent, other, grandchild)] == [1, 1, 1]
        assert branch(parent, ttl_s=0.1)
    host.emptied()


def test_a_checkpoint_whose_process_was_killed_is_unknown(host: Host) -> None:
    with host.open() as client:
        client.ask("reset", {})
        before = {each.pid for each in host.children()}
        node = client.ask("checkpoint")["data"]
        [parked] = [each for each in host.children() if each.pid not in before]
        parked.kill()
        wait_until_exited([parked])
        told = client.ask("restore", {"checkpoint_id": node["checkpoint_id"]})["data"]
        assert told["code"] == "CHECKPOINT_UNKNOWN"
        assert step(client)["at"] == 1


def test_an_environment_that_does_not_close_delays_no_restore(serve: StartHost) -> None:
    host = serve("forked:Forked", max_sessions=2, env={"PATIENCE": "0.5"})
    with host.open() as client:
        seen = client.ask("reset", {})
        node = client.ask("checkpoint")["data"]
        own = psutil.Process(step(client)["pid"])
        client.ask("step", {"how": "hang_at_close"})
        assert client.ask("restore", {"checkpoint_id": node["checkpoint_id"]}) == seen
        assert step(client)["at"] == 1
        wait_until_exited([own])
    host.emptied()


def test_tasks_run_between_calls_and_forbid_a_fork_meanwhile(serve: StartHost) -> None:
    host = serve("forked:AsyncForked", max_sessions=2)
    with host.open() as client:
        client.ask("reset", {})
        client.ask("step", {"how": "task"})
        until(lambda: client.ask("state")["data"]["step_count"] > 10)
        told = client.ask("branch", {})["data"]
        assert (told["code"], told["reason"]) == ("BRANCH_UNSUPPORTED", "threads")
        assert "task counting" in told["found"]
        client.ask("step", {"how": "cancel"})
        assert len(branch(client)) == 1


@pytest.mark.parametrize("is_watched", [False, True], ids=["by the kernel", "by a watchdog"])
def test_a_branch_over_its_cap_is_killed_alone(serve: StartHost, is_watched: bool) -> None:
    if not is_watched and (why := GroupsBelow().why_not):
        pytest.skip(f"no memory cgroups: {why}")
    text = MODULE + WITHOUT_CGROUPS if is_watched else MODULE
    host = serve("forked:Forked", files={"forked.py": text}, max_sessions=4, session_memory_mb=64)
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {})
        hungry, other = (stack.enter_context(attach(host, e)) for e in branch(parent, count=2))
        assert step(other)["at"] == 1
        hungry.send("step", {"how": "eat"})
        told, _ = hungry.last_word()
        assert "MB; its limit was 64 MB (" in told["data"]["message"]
        assert step(other)["at"] == 2
        assert step(parent)["at"] == 1
        parent.send("step", {"how": "eat"})
        assert "for memory at" in parent.last_word()[0]["data"]["message"]
        assert step(other)["at"] == 3
    host.emptied()


def test_an_error_of_a_branch_is_answered_and_the_branch_continues(host: Host) -> None:
    with host.open() as parent:
        parent.ask("reset", {})
        with attach(host, *branch(parent)) as client:
            told = client.ask("step", {"how": "raise"})["data"]
            assert (told["code"], told["message"]) == ("EXECUTION_ERROR", "no such door")
            assert re.search(r"/forked\.py:\d+, in do_raise$", told["place"])
            assert step(client)["at"] == 1


def test_a_session_returns_to_a_parked_copy_of_its_process(host: Host) -> None:
    with host.open() as client:
        client.ask("reset", {"seed": 3})
        seen = client.ask("step", {"by": 4})
        made = client.ask("checkpoint")["data"]
        assert made["by"] == "fork"
        node, nexts = {"checkpoint_id": made["checkpoint_id"]}, []
        for _ in range(3):
            nexts.append({**step(client), "pid": 0})
            step(client, 50)
            assert client.ask("restore", node) == seen
        assert nexts == nexts[:1] * 3
        with attach(host, *branch(client)) as other:
            step(other, 9)
            assert other.ask("restore", node) == seen
            assert step(other)["at"] == step(client)["at"] == 5


@pytest.mark.parametrize("how", ["ends", "is killed", "with its host"])
def test_nothing_is_left_of_branches_and_checkpoints(host: Host, how: str) -> None:
    with host.open() as parent, ExitStack() as stack:
        parent.ask("reset", {})
        for each in branch(parent, count=2):
            step(stack.enter_context(attach(host, each)))
        for _ in range(3):
            assert parent.ask("checkpoint")["type"] == "checkpoint"
        shards = {each["pid"] for each in host.http("GET", "/capacity")[1]["shards"]}
        family = [each for each in host.children() if each.pid not in shards][1:]  # the template
        assert len(family) == 3 + 3
        if how == "is killed":
            psutil.Process(step(parent)["pid"]).kill()
            parent.last_word()
            stack.close()
        elif how == "with its host":
            host.process.kill()
        else:
            parent.leave()
            stack.close()
            host.emptied()
        wait_until_exited(family)


def test_a_branch_whose_step_hangs_ends_at_its_time_limit_alone(serve: StartHost) -> None:
    host = serve("forked:Forked", max_sessions=3, step_timeout_seconds=0.5)
    with host.open() as parent:
        parent.ask("reset", {})
        with attach(host, *branch(parent)) as client:
            client.send("step", {"how": "hang"})
            assert "did not finish within" in client.last_word()[0]["data"]["message"]
        assert step(parent)["at"] == 1


def test_many_branches_in_a_row_leave_no_descriptor_process_or_slot(host: Host) -> None:
    def counts() -> tuple[int, int]:
        shards = [psutil.Process(e["pid"]) for e in host.http("GET", "/capacity")[1]["shards"]]
        return sum(each.num_fds() for each in shards), len(host.children())

    with host.open() as parent:
        parent.ask("reset", {})
        for number in range(60):
            for each in branch(parent, count=3):
                with attach(host, each) as client:
                    client.leave()
            host.until(lambda capacity: capacity["sessions"] == 1)
            if number == 5:
                before = counts()
        until(lambda: counts()[1] <= before[1])
        assert counts()[0] <= before[0] + 3
        assert parent.ask("state")["type"] == "state"
