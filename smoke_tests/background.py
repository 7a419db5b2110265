# SPDX-License-Identifier: Apache-2.0
"""Programs in the background, such as engines and servers of a test: start, wait for, end."""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil

START_SECONDS = 300.0  # of a server, on a busy machine
STOP_SECONDS = 20.0
MAX_CHARS = 3000  # of a log that is shown
_UVICORNS_ADDRESS = re.compile(r"running on (http://\S+)")
Program = subprocess.Popen[bytes]


def start(command: Sequence[str | Path], log: Path, **options: Any) -> Program:
    """Start a program in a session of its own; its output is appended to a file."""
    null = subprocess.DEVNULL
    with log.open("ab") as out:
        return subprocess.Popen(
            list(map(str, command)),
            stdin=null,
            stdout=out,
            stderr=out,
            start_new_session=True,
            **options,
        )


def read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def wait_until(
    check: Callable[[], object], programs: Mapping[Path, Program], within: float = START_SECONDS
) -> None:
    """Wait until a check holds, while programs run; each is named by its log.

    Raises:
        RuntimeError: A program has ended, or the time is over. It quotes the end of the log.
    """
    deadline = time.monotonic() + within
    while not check():
        for log, program in programs.items():
            if program.poll() is not None:
                raise RuntimeError(f"{log.stem} has ended: {read(log)[-MAX_CHARS:]}")
        if time.monotonic() > deadline:
            said = "".join(f"\n{log.stem}: {read(log)[-MAX_CHARS:]}" for log in programs)
            raise RuntimeError(f"not ready within {within:g} s{said}")
        time.sleep(0.02)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process with SIGSTOP: it takes what it is sent, and answers nothing."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def end(
    program: Program, number: signal.Signals = signal.SIGTERM, within: float = STOP_SECONDS
) -> None:
    """Send a program a signal and wait for its exit; kill it when the time is over."""
    program.send_signal(number)
    try:
        program.wait(within)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


@contextmanager
def running(command: Sequence[str | Path], log: Path, **options: Any) -> Iterator[Program]:
    """Run a program, and end it with everything that it has started."""
    program = start(command, log, **options)
    try:
        yield program
    finally:
        is_over = program.poll() is not None
        below = [] if is_over else psutil.Process(program.pid).children(recursive=True)
        end(program)
        for child in below:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(below, STOP_SECONDS)


def title(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def unmount_below(folder: Path) -> None:
    """Unmount everything below a folder, the deepest first."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mounted in sorted((each for each in mounts if each.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mounted], check=False)


def answers(address: str) -> bool:
    """Return whether a server answers a request for its health, with any status."""
    try:
        urlopen(f"{address}/health", timeout=10).close()
    except HTTPError as exc:
        exc.close()
    except (OSError, HTTPException):
        return False
    return True


@contextmanager
def uvicorn(
    command: Sequence[str | Path], log: Path, **options: Any
) -> Iterator[tuple[Program, str]]:
    """Run a command of uvicorn; yield the program and its address.

    Raises:
        RuntimeError: It does not start.
    """
    program = start([*command, "--port", "0", "--no-access-log"], log, **options)
    try:
        wait_until(lambda: _UVICORNS_ADDRESS.search(read(log)), {log: program})
        yield program, _UVICORNS_ADDRESS.findall(read(log))[-1]
    finally:
        end(program)
