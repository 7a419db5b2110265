# SPDX-License-Identifier: Apache-2.0
"""Rollouts by the installed command that are killed in the middle; used by `rollouts.py`.

Each looks on until some episodes exist for certain, kills, lets the same rollout go on, and counts
rows in the files themselves: every episode once, with all of its steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_tests.shared.report import OPENENV
from openenvd.rollouts.folder.index import episodes_in
from openenvd.rollouts.folder.readers import open_rollouts

REPOSITORY = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 240.0
LOOK_SECONDS = 0.02
STEP_SECONDS = 0.01  # so that there is a middle to be killed in
LEAK_LIMIT = "120M"
POLICY_LEAKS_BYTES = 160 << 20  # in all steps together: killed when some have finished
ENVIRONMENT_LEAKS_BYTES = 320 << 20  # several times
LEAKY_ENVIRONMENT = "load_tests.envs_for_load.leaky_environment:LeakyEnvironment"


@dataclass(frozen=True)
class Home:
    """A daemon's, and where its rollouts go."""

    environ: Mapping[str, str]
    folder: Path
    episodes: int
    steps: int

    def leak(self, all_bytes: int) -> tuple[str, str]:
        """Words of a command: what each step is to keep."""
        return "-e", f"LEAK_BYTES={all_bytes // (self.episodes * self.steps)}"

    def openenv(self, *words: str) -> Any:
        """The JSON answer of a command, whatever its exit code."""
        done = subprocess.run(
            [OPENENV, *words, "--json"], env=dict(self.environ), cwd=REPOSITORY, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        if not done.stdout.strip():
            raise SystemExit(f"openenv {' '.join(words)}: {done.stderr}")
        return json.loads(done.stdout)

    def rollout(
        self, out: str, *more: str, policy: str = "plain", environment: str = "benchmark"
    ) -> str:
        """The id of a new request."""
        action = json.dumps({"answer_bytes": 2000, "wait_seconds": STEP_SECONDS})
        answer = self.openenv(
            "rollout", environment, "--async", "--out", str(self.folder / out),
            "--episodes", str(self.episodes), "--max-steps", str(self.steps),
            "--concurrency", str(max(1, self.episodes // 8)), "-e", f"ROLLOUT_STEP={action}",
            "--policy", f"load_tests.shared.rollout_policies:{policy}", *more,
        )  # fmt: skip
        return str(answer["request_id"])

    def wait(self, request_id: str) -> dict[str, Any]:
        """The request when it has ended."""
        answer = self.openenv("wait", request_id)
        found: dict[str, Any] = answer.get("request", answer)
        return found

    def finished(self, out: str) -> int:
        """How many episodes exist for certain."""
        return len(episodes_in(self.folder / out))


@dataclass
class Counted:
    """What lies in a folder."""

    episodes: int = 0
    wanted: int = 0
    twice: int = 0
    incomplete: int = 0  # not as many steps as the row says, or not the wanted ones
    damaged: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.episodes == self.wanted and not (self.twice or self.incomplete or self.damaged)

    def sentence(self) -> str:
        """For people."""
        told = f"{self.episodes} of {self.wanted} episodes exist, {self.twice} of them twice, "
        told += f"{self.incomplete} incomplete{', ' + self.damaged if self.damaged else ''}"
        facts = ", ".join(f"{name} {value}" for name, value in self.notes.items())
        return f"{told} ({facts})"


def count(home: Home, out: str) -> Counted:
    """From the rows of all files that a pattern finds, not from our own index."""
    told = Counted(wanted=home.episodes)
    steps, rows = Counter[str](), Counter[str]()
    for kind in ("episodes", "packs"):
        for path in (home.folder / out / kind).glob("**/*.jsonl"):
            for row in map(json.loads, path.read_bytes().splitlines()):
                counted = {"step": steps, "end": rows}.get(row["kind"])
                if counted is not None:
                    counted[row["episode_id"]] += 1
    told.episodes, told.twice = len(rows), sum(times > 1 for times in rows.values())
    told.incomplete = sum(steps[i] != home.steps for i in rows) + len(steps.keys() - rows.keys())
    rollouts = open_rollouts(home.folder / out)
    if set(rollouts.episode_ids()) != rows.keys():
        told.damaged = "our reader finds other episodes than a pattern"
    try:
        rollouts.verify()
    except Exception as exc:
        told.damaged = str(exc)
    return told


def kill_worker(home: Home) -> Counted:
    """`kill -9` of the worker; then the same command again, where the request was not requeued."""
    request_id = home.rollout("worker")
    before = _in_the_middle(home, "worker")
    os.kill(_worker_of(home, request_id), signal.SIGKILL)
    first = home.wait(request_id)
    if first["state"] != "SUCCEEDED":
        home.wait(home.rollout("worker"))
    told = count(home, "worker")
    told.notes = {"finished before the kill": before, "its request": _state(first)}
    return told


def kill_daemon(home: Home) -> Counted:
    """`kill -9` of the daemon; the next one takes the request up by itself."""
    request_id = home.rollout("daemon")
    before = _in_the_middle(home, "daemon")
    os.kill(home.openenv("status")["daemon"]["pid"], signal.SIGKILL)
    home.openenv("up")
    final = home.wait(request_id)
    told = count(home, "daemon")
    told.notes = {"finished before the kill": before, "its request": _state(final)}
    return told


def leak_in_policy(home: Home) -> Counted:
    """Killed for memory and told so; what was finished is kept; `--retry-oom` finishes the rest."""
    words = ("--memory", LEAK_LIMIT, *home.leak(POLICY_LEAKS_BYTES))
    first = home.wait(home.rollout("policy", *words, policy="leaking"))
    kept = home.finished("policy")
    request_id = home.rollout("policy", *words, "--retry-oom", policy="leaking")
    final = home.wait(request_id)
    told = count(home, "policy")
    told.notes = {
        "first": _state(first),
        "kept": kept,
        "with --retry-oom": f"{_state(final)} after {final['attempts']} attempts",
    }
    if "oom_killed" not in _state(first) or not kept:
        told.damaged = "the death was not told as one for memory, or nothing was kept"
    return told


def leak_in_environment(home: Home) -> Counted:
    """The replica is killed for memory and told so; a new one serves the episodes tried again."""
    leak = home.leak(ENVIRONMENT_LEAKS_BYTES)
    home.openenv("launch", LEAKY_ENVIRONMENT, "--name", "leaky", "--memory", LEAK_LIMIT, *leak)
    final = home.wait(home.rollout("leaky", "--retries", "20", environment="leaky"))
    for _ in range(5):
        if final["state"] == "SUCCEEDED" and home.finished("leaky") == home.episodes:
            break
        final = home.wait(home.rollout("leaky", "--retries", "20", environment="leaky"))
    [shown] = home.openenv("status", "leaky")["environments"]
    told = count(home, "leaky")
    replica = shown["replicas"][0]
    death: dict[str, Any] = replica["exit"] or next(iter(replica["exits"]), {})
    told.notes = {
        "told of it": death.get("message") or replica["message"],
        "deaths": max(replica["restarts"], sum(replica["exit_kinds"].values())),
        "episodes tried again": (final.get("result") or {}).get("retries"),
    }
    home.openenv("down", "leaky")
    if death.get("reason", death).get("kind") != "oom_killed":
        told.damaged = "the replica was not killed for memory, or that was not told"
    return told


CRASHES: dict[str, Callable[[Home], Counted]] = {
    "kill -9 of the worker": kill_worker,
    "kill -9 of the daemon": kill_daemon,
    "policy that leaks": leak_in_policy,
    "environment that leaks": leak_in_environment,
}


def _in_the_middle(home: Home, out: str) -> int:
    """When a quarter of the episodes exist: how many they are."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if (now := home.finished(out)) >= home.episodes // 4:
            return now
        time.sleep(LOOK_SECONDS)
    raise SystemExit(f"the rollout into {out} does not get on")


def _worker_of(home: Home, request_id: str) -> int:
    [request] = [r for r in home.openenv("requests")["requests"] if r["id"] == request_id]
    [pid] = [w["pid"] for w in home.openenv("info")["workers"] if w["name"] == request["worker"]]
    return int(pid)


def _state(request: Mapping[str, Any]) -> str:
    error = request.get("error")
    return f"{request['state']}{': ' + error['kind'] if error else ''}"
