# SPDX-License-Identifier: Apache-2.0
"""What the tests have workers do. Imported by workers by its dotted name."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Progress = Callable[[Json], None]

FOREVER_SECONDS = 3600


class RefusedError(Exception):
    """As an operation says no: with a kind and a hint."""

    kind = "invalid"
    hint = "ask for something else"


def echo(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    return payload


def context(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    return {"request_id": request_id, "home": home, "pid": os.getpid(), "cwd": str(Path.cwd())} | {
        "threads": os.environ.get("OMP_NUM_THREADS")
    }


def inheritable(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    return [fd for fd in range(3, 64) if is_open(fd) and os.get_inheritable(fd)]


def is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.fstat(fd))
    return False


def report(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    for step in range(3):
        progress({"step": step})


def print_lines(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    print("from python")
    print("to stderr", file=sys.stderr)
    os.write(1, b"by descriptor\n")
    subprocess.run(["echo", "from a child"], check=True)


def flood(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    block = b"x" * 79 + b"\n"
    for _ in range(200):
        os.write(1, block * 1000)
    return "done"


def close_stdout(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    os.close(1)
    return "done"


def close_stderr(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    os.close(2)
    return "done"


def close_python_stdout(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    sys.stdout.close()
    return "done"


def close_everything(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    os.closerange(3, 4096)
    hang(payload, request_id, home, progress)


def fail(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    raise ValueError("no such thing")


def refuse(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    raise RefusedError("that cannot be done")


def sys_exit(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    sys.exit(3)


def memory_error(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    raise MemoryError


def die(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    print("last words", flush=True)
    if payload["how"] == "exit":
        os._exit(7)
    if payload["how"] == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), getattr(signal, payload["how"]))
    time.sleep(FOREVER_SECONDS)


def huge(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    return "x" * payload["size"]


def not_json(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    return {1, 2, 3}


def grow(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    return len(bytearray(os.urandom(1) * payload["size"]))


def hang(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    progress({"pid": os.getpid()})
    time.sleep(FOREVER_SECONDS)


def hang_and_clean_up(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    try:
        progress({"pid": os.getpid()})
        time.sleep(FOREVER_SECONDS)
    finally:
        Path(payload["path"]).write_text("cleaned up")


def ignore_terminate(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(payload, request_id, home, progress)


def hang_with_family(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    """A child, its child, and a child in a session of its own; all of which ignore SIGTERM."""
    script = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if sys.argv[1] == 'child':\n"
        "    below = subprocess.Popen([sys.executable, '-c', sys.argv[2], 'leaf', ''],\n"
        "                             stdout=subprocess.PIPE)\n"
        "    below.stdout.readline()\n"
        "    print(below.pid, flush=True)\n"
        "else:\n"
        "    print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, "child", script], stdout=subprocess.PIPE, text=True
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", script, "leaf", ""],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert stranger.stdout is not None
    grandchild = int(child.stdout.readline())
    stranger.stdout.readline()
    pids = [child.pid, grandchild] + ([stranger.pid] if payload.get("stranger", True) else [])
    if not payload.get("stranger", True):
        stranger.kill()
        stranger.wait()
    progress({"pid": os.getpid(), "family": pids})
    if payload.get("then") == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if payload.get("then") == "return":
        return
    while True:
        time.sleep(FOREVER_SECONDS)


def leave_thread(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    threading.Thread(target=time.sleep, args=(FOREVER_SECONDS,), daemon=True).start()


def grow_child(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    script = f"x = bytearray(b'1' * {payload['size']})"
    subprocess.run([sys.executable, "-c", script], check=True)


def oom_grandchild_and_hang(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    """As an operation that bears the death of what it has started."""
    with contextlib.suppress(subprocess.CalledProcessError):
        grow_child(payload, request_id, home, progress)
    hang(payload, request_id, home, progress)


def oom_grandchild_and_fail(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    with contextlib.suppress(subprocess.CalledProcessError):
        grow_child(payload, request_id, home, progress)
    progress({"pid": os.getpid()})
    while not Path(payload["until"]).exists():
        time.sleep(0.01)
    raise ValueError("no child answered")


def start_without_room(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    (Path(payload["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    (Path(payload["group"]) / "pids.max").write_text("1")
    subprocess.run(["true"], check=True)


def grow_and_hang(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    kept = bytearray(payload["size"])
    kept[::4096] = b"1" * len(kept[::4096])
    hang(payload, request_id, home, progress)


def grow_child_and_hang(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    script = f"import time; x = bytearray(b'1' * {payload['size']}); time.sleep(3600)"
    subprocess.run([sys.executable, "-c", script], check=True)


_KEPT: list[bytearray] = []


def keep(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    kept = bytearray(payload["size"])
    kept[::4096] = b"1" * len(kept[::4096])
    _KEPT.append(kept)
    return os.getpid()


def wait_for(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    while not Path(payload["path"]).exists():
        time.sleep(0.01)


def print_by_child(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    subprocess.run(["echo", "from a child"], check=True)
    if payload.get("then") == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def print_and_hang(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    print("so far")
    hang(payload, request_id, home, progress)


def environment(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    return os.environ.get(payload["name"])


def terminate_a_child(payload: Json, request_id: str, home: str, progress: Progress) -> Any:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(FOREVER_SECONDS,))
    child.start()
    child.terminate()
    child.join()
    return child.exitcode
