# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a headless Chromium, of a daemon with many requests and many replicas.

    first screen    a page with nothing cached, in an empty tab: from the start of the navigation
                    until memory, environments and queue are painted; all bytes
    again           the same page, loaded by a browser that has cached its files
    quiet           the page is open, and no request runs
    busy            the page is open, and SHORT requests run all the time
    a death         from the kill of a replica for memory until the page shows it

The requests are real ones: half of them have run, and half wait for the only LONG worker, which a
launch that never becomes ready occupies. The replicas are real servers of the bundled `echo`.
Aims: the first screen in 300 ms and 150 kB, an update in 100 ms, a p99 lag of the daemon's event
loop of 10 ms, 20 MB of memory above the idle daemon's, a death shown within a second.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import sync_playwright

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import (
    MEGABYTE,
    OPENENV,
    Report,
    daemon,
    daemon_pid,
    parse_arguments,
    percentile,
)
from openenvd.client import daemon as daemons
from openenvd.schema.settings import Paths
from smoke_tests.chromium import find_chromium

CLIENTS = 16
EACH = 20  # replicas of an environment
MEMORY_MB = 120
UNUSED_PORT = 9
SETTLE_SECONDS = 3.0
TAB_SECONDS = 0.7  # until a new tab is quiet
NOBODY_SECONDS = 0.5  # between two loads: the daemon drops what it keeps for open pages
WAIT_MILLISECONDS = 60_000
SCRIPT = Path(__file__).with_suffix(".js")
STUCK = "import time\ntime.sleep(3600)\n"
HUNGRY = """
import time
from pathlib import Path
from openenvd import Action, Environment, Observation, State

class Hungry(Environment[Action, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()
    def step(self, action, timeout_s=None, **kwargs):
        held, last = [], Path(__file__).with_name("last")
        now = last.with_suffix(".now")
        while True:
            held.append(b"1" * (4 << 20))
            now.write_text(str(time.time()))
            now.replace(last)  # whole, whenever it is killed
    @property
    def state(self):
        return State()
"""


def main() -> int:
    """Measure the page in each repetition, with a new daemon, new requests and new replicas."""
    options = parse_arguments(
        "The dashboard.",
        repetitions=1,
        requests={"type": int, "default": 10_000, "help": "requests, half of which wait"},
        replicas={"type": int, "default": 200},
        loads={"type": int, "default": 20, "help": "loads of the page, each time"},
        seconds={"type": float, "default": 60.0, "help": "how long the page is watched, each time"},
        short={"action": "store_true", "help": "small numbers, to check that it runs"},
    )
    if options.short:
        options.requests, options.replicas, options.seconds, options.loads = 400, 4, 3.0, 2
    if (program := find_chromium()) is None:
        print("Dashboard: skipped, there is no Chromium")
        return 0
    report = Report("Dashboard")
    for _ in range(options.repetitions):
        _Repetition(program, options, report).run()
    report.note(f"{options.requests:,} requests, {options.replicas} replicas of `echo`.")
    report.note("An update: the main thread's busy time, divided by the number of updates.")
    report.finish(options.json)
    return 0


class _Repetition:
    """Measures the page of one daemon."""

    def __init__(self, program: str, options: argparse.Namespace, report: Report) -> None:
        self._program = program
        self._note = report.append
        self._requests: int = options.requests
        self._replicas: int = options.replicas
        self._seconds: float = options.seconds
        self._loads: int = options.loads

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="openenvd-load-") as sources, daemon() as environ:
            self._environ = {**environ, "OPENENV_MAX_LONG_WORKERS": "1"}
            self._home = environ["OPENENV_HOME"]
            self._sources = Path(sources)
            for words in (["stop"], ["up"]):
                subprocess.run(
                    [OPENENV, *words], env=self._environ, check=True, capture_output=True
                )
            time.sleep(SETTLE_SECONDS)
            idle = self._memory()
            self._fill()
            time.sleep(SETTLE_SECONDS)
            full = self._memory()
            self._note("memory above idle, no page open", "MB", full - idle)
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(
                    executable_path=self._program, args=["--no-sandbox"]
                )
                self._look(chromium, idle, full)
                chromium.close()

    def _memory(self) -> float:
        daemon_process = psutil.Process(daemon_pid(self._environ))
        return float(daemon_process.memory_full_info().pss / MEGABYTE)

    def _openenv(self, *words: str) -> str:
        command = [OPENENV, *words]
        done = subprocess.run(
            command, env=self._environ, cwd=self._sources, check=True, stdout=subprocess.PIPE
        )
        return done.stdout.decode()

    def _fill(self) -> None:
        (self._sources / "stuck_env.py").write_text(STUCK)
        (self._sources / "hungry_env.py").write_text(HUNGRY)
        self._openenv(
            "launch", "hungry_env:Hungry", "--name", "hungry", "--memory", f"{MEMORY_MB}M"
        )
        for number in range(-(-self._replicas // EACH)):
            count = min(EACH, self._replicas - number * EACH)
            self._openenv("launch", "echo", "--name", f"echo-{number}", "--replicas", str(count))
        self._openenv("launch", "stuck_env:Stuck", "--name", "stuck", "--async")
        asyncio.run(self._submit_all())

    async def _submit_all(self) -> None:
        unreachable = f"http://127.0.0.1:{UNUSED_PORT}"
        half = self._requests // 2

        async def one(number: int) -> None:
            client = ApiClient(self._home)
            for at in range(number, half, CLIENTS):
                await client.submit("rollout", {"name": unreachable, "out": f"/nowhere/{at}"})
            for _ in range(number, half, CLIENTS):
                await client.run("probe", {"name": "echo-0"})
            await client.close()

        await asyncio.gather(*(one(number) for number in range(CLIENTS)))

    def _look(self, chromium: Any, idle: float, full: float) -> None:
        link = self._openenv("dashboard", "--no-open").split()[0]
        signing_in = chromium.new_context()
        page = signing_in.new_page()
        page.goto(link)
        page.locator("[data-connection=connected]").wait_for()
        kept = signing_in.storage_state()
        signing_in.close()
        address = link.partition("#")[0]

        def new_context() -> Any:
            context = chromium.new_context(storage_state=kept)
            context.set_default_timeout(WAIT_MILLISECONDS)
            context.add_init_script(path=SCRIPT)
            return context

        for _ in range(self._loads):
            context = new_context()
            self._first_screen(context, address, "")
            self._first_screen(context, address, ", again")
            context.close()
        context = new_context()
        page = context.new_page()
        page.goto(address)
        page.locator("[data-connection=connected]").wait_for()
        session = context.new_cdp_session(page)
        session.send("Performance.enable")
        self._watch(page, session, "quiet")
        ends = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(asyncio.run, _submit_until(ends, self._home))
            try:
                self._watch(page, session, "busy")
            finally:
                ends.set()
        self._note("  requests run meanwhile", "req/s", busy.result())
        open_page = self._memory()
        self._note("memory above idle, page open", "MB", open_page - idle)
        self._note("  of which by the page", "MB", open_page - full)
        self._death(page)
        context.close()

    def _first_screen(self, context: Any, address: str, when: str) -> None:
        page = context.new_page()
        received: dict[str, float] = {}  # bytes on the wire, by call id
        _count_bytes(context.new_cdp_session(page), received)
        time.sleep(TAB_SECONDS)
        page.goto(address, wait_until="commit")
        milliseconds = page.evaluate("measure.firstScreen()")
        self._note(f"first useful screen{when} (aim: 300)", "ms", milliseconds)
        self._note(f"  in all{when} (aim: 150)", "kB", sum(received.values()) / 1000)
        self._note(f"  files and calls{when}", "", sum(size > 0 for size in received.values()))
        page.close()
        time.sleep(NOBODY_SECONDS)

    def _watch(self, page: Any, session: Any, name: str) -> None:
        page.evaluate("measure.watch()")
        before = self._busy_seconds(session)
        page.wait_for_timeout(self._seconds * 1000)
        spent = (self._busy_seconds(session) - before) * 1000
        updates, longest = page.evaluate("[measure.updates, measure.longest]")
        self._note(f"{name}: updates a second", "", len(updates) / self._seconds)
        if updates:
            self._note(f"{name}: an update, all of it (aim: 100)", "ms", spent / len(updates))
            self._note(f"{name}: its script, p99", "ms", percentile(updates, 0.99))
        self._note(f"{name}: longest task over 50 ms", "ms", longest)
        self._note(f"{name}: the daemon's loop lag, p99 (aim: 10)", "ms", self._lag_milliseconds())

    def _busy_seconds(self, session: Any) -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    def _lag_milliseconds(self) -> float:
        loop = daemons.connect(Paths(Path(self._home))).info()["daemon"]["loop"]
        return float(loop["p99_seconds"]) * 1000

    def _death(self, page: Any) -> None:
        """Measure from the growing process's last write until the page shows its death."""
        url = openenv(self._environ, "status", "hungry")["environments"][0]["address"] + "/step"
        body = json.dumps({"action": {}}).encode()
        headers = {"Content-Type": "application/json"}
        step = urllib.request.Request(url, body, headers)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(step, timeout=30).read()
        seen_at = page.evaluate("measure.deathShown()")
        last = float((self._sources / "last").read_text())
        self._note("a death for memory, until it is seen (aim: 1)", "s", seen_at - last)


def _count_bytes(session: Any, received: dict[str, float]) -> None:
    """Count the bytes of each call of a page; headers are included when the call has ended."""

    def note(event: dict[str, Any]) -> None:
        call = event["requestId"]
        received[call] = received.get(call, 0) + event["encodedDataLength"]

    def end(event: dict[str, Any]) -> None:
        received[event["requestId"]] = event["encodedDataLength"]

    session.send("Network.enable")
    session.on("Network.dataReceived", note)
    session.on("Network.loadingFinished", end)


async def _submit_until(ends: threading.Event, home: str) -> float:
    """Submit SHORT requests, one after another; return how many ran in a second."""
    client, count, began = ApiClient(home), 0, time.monotonic()
    while not ends.is_set():
        await client.run("probe", {"name": "echo-0"})
        count += 1
    await client.close()
    return count / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
