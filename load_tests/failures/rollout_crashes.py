# SPDX-License-Identifier: Apache-2.0
"""Kills at random during rollouts: is each episode in the folder exactly once?

    python -m load_tests.failures.rollout_crashes [--kills 200] [--seed 1] [--short] [--json FILE]

There are four kinds of rollouts: plain; in groups; with `--retry-oom` and a policy that exceeds its
memory limit; and with an environment that is killed for memory in a step. The worker, the daemon or
the environment is killed at random moments, and the same command continues the folder until it
succeeds. Then each episode must be there once with its steps, both in the files and by the
product's reader. Otherwise, or if a death for memory was not shown as one, the exit code is 1.

After each folder the results are written to the JSON file, and a later call with the same file
continues until `--kills` processes were killed.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import psutil

from load_tests.failures import worlds
from load_tests.failures.worlds import FOR_MEMORY, Home
from load_tests.shared.api_client import FINAL
from load_tests.shared.report import KILLED, Findings, daemon, parse_arguments
from openenvd.rollouts.folder.readers import open_rollouts

EPISODES, STEPS, GROUP = 100, 5, 4  # two thirds have a file each until they are packed
MAX_KILLS = 5  # of one rollout: below an environment's restart budget
PAUSE_SECONDS = 1.0  # at most, between two kills
POLL_INTERVAL_SECONDS = 0.2
EXPLAINED_SECONDS, MAX_SECONDS = 60.0, 300.0  # of a death for memory; of a rollout
KINDS = {
    "plain": (),
    "groups": ("--group", str(GROUP), "--advantages", "leave-one-out"),
    "worker for memory": ("--retry-oom", "--memory", "120M", "--env", "LEAK_BYTES=400000"),
    "environment for memory": ("--env", "TAKE_MEMORY=1"),
}
POLICIES = """
import asyncio, os
from pathlib import Path
from openenvd.rollouts import Array, Decision

leaked = []

async def act(observation, turn):
    leaked.append(os.urandom(int(os.environ.get("LEAK_BYTES", 0))))
    await asyncio.sleep(0.03)
    number = int(turn.episode_id)
    taken = Path(__file__).with_name("taken")
    if number == 20 and turn.number == 3 and "TAKE_MEMORY" in os.environ and not taken.exists():
        taken.touch()  # once
        return {"metadata": {"take_memory": True}}
    noise = os.urandom(60_000 if number % 3 else 0)
    return Decision({}, arrays={"noise": Array(noise, "uint8", (len(noise),))})
"""


class Campaign(Findings):
    """Plays rollouts one after another, kills processes, and finds the faults of folders."""

    def __init__(self, home: Home, given: argparse.Namespace) -> None:
        super().__init__(given)
        self._home = home
        self._chance = random.Random(f"{given.seed} {self.kills()}")

    def play(self, kind: str, folder: Path) -> None:
        """Play one rollout to its end, and count what is in its folder."""
        (folder / "policies.py").write_text(POLICIES)
        self._home.openenv("launch", "world_environment:WorldEnvironment", "--name", "world", "-e",
                           "WHOSE=world-1", "--memory", "250M")  # fmt: skip
        request, left = self._begin(kind, folder), MAX_KILLS
        if "memory" in kind:
            self._await_death(kind, request)
        deadline = time.monotonic() + MAX_SECONDS  # of a rollout: then episodes are missing
        while (state := self._request(request)["state"]) != "SUCCEEDED":
            if time.monotonic() > deadline:
                break
            if state in FINAL:
                self.seen["commands that were repeated"] += 1
                request = self._begin(kind, folder)
            time.sleep(self._chance.random() * PAUSE_SECONDS)
            if left and self._kill():
                left -= 1
        self.wrong += [f"{kind}: {fault}" for fault in faults(folder / "out", kind)]
        self.seen[f"folders: {kind}"] += 1
        self._home.openenv("down", "world")

    def _begin(self, kind: str, folder: Path) -> str:
        with chdir(folder):  # where the policy is
            answer = self._home.openenv(
                "rollout", "world", "--async", "--out", "out", "--policy", "policies:act",
                "--episodes", str(EPISODES), "--max-steps", str(STEPS), "--concurrency", "4",
                "--retries", "20", *KINDS[kind],
            )  # fmt: skip
        return str(answer["request_id"])

    def _request(self, request: str) -> Any:
        return self._home.openenv("status", request)["requests"][0]

    def _await_death(self, kind: str, request: str) -> None:
        """Wait until the death of a process is shown as one for memory."""
        deadline = time.monotonic() + EXPLAINED_SECONDS
        while time.monotonic() < deadline:
            shown = self._request(request)["attempts"] > 1  # `--retry-oom`
            if shown or any(found[FOR_MEMORY] for found in worlds.exits(self._home).values()):
                self.seen[f"{KILLED}{kind}"] += 1
                return
            time.sleep(POLL_INTERVAL_SECONDS)
        self.wrong.append(f"{kind}: no death for memory is shown")

    def _kill(self) -> bool:
        """Kill one process; return False if it does not run now."""
        what = self._chance.choice(["worker", "daemon", "environment"])
        with suppress(psutil.Error, LookupError, ProcessLookupError, StopIteration):
            if what == "worker":
                workers = self._home.openenv("info")["workers"]
                found = [each["pid"] for each in workers if each["label"] == "rollout world"]
                psutil.Process(self._chance.choice(found)).kill()
            elif what == "daemon":
                worlds.kill_daemon(self._home, self._chance)
            else:
                next(worlds.kill_replicas(self._home, self._chance))
            self.seen[f"{KILLED}{what}"] += 1
            return True
        return False


def faults(out: Path, kind: str) -> list[str]:
    """Compare a folder with the wanted episodes, without our reader and with it."""
    files = out.glob("[ep]*/**/*.jsonl")  # episodes and packs
    rows = [json.loads(line) for path in files for line in path.read_bytes().splitlines()]
    ends = Counter(row["episode_id"] for row in rows if row["kind"] == "end")
    steps = Counter((row["episode_id"], row["step"]) for row in rows if row["kind"] == "step")
    wanted = [f"{number:06d}" for number in range(EPISODES)]
    advantages = [each for each in rows if (each.get("episode") or {}).get("advantage") is not None]
    found = []
    if ends != Counter(wanted):
        found.append(f"missing: {Counter(wanted) - ends}, too many: {ends - Counter(wanted)}")
    if steps != Counter((each, step) for each in wanted for step in range(STEPS)):
        found.append(f"{len(steps)} steps, the most frequent of them {steps.most_common(1)}")
    if len(advantages) != (EPISODES if kind == "groups" else 0):
        found.append(f"{len(advantages)} episodes have an advantage")
    rollouts = open_rollouts(out)
    rollouts.verify()
    if rollouts.episode_ids() != wanted or any((out / "damaged").glob("*")):
        found.append(f"our reader finds {len(rollouts)} episodes, or files were damaged")
    return found


def main() -> int:
    """Kill until `--kills` processes were killed; at least one rollout of each kind is played."""
    kills, seed = ({"type": int, "default": default} for default in (200, 1))
    short = {"action": "store_true"}
    given = parse_arguments("Kills in rollouts.", 1, kills=kills, seed=seed, short=short)
    wanted = len(KINDS) if given.short else given.kills
    with chdir(worlds.SOURCE), daemon() as environ:
        campaign = Campaign(Home(environ, None), given)
        while campaign.kills() < wanted:
            for kind in KINDS:
                with tempfile.TemporaryDirectory() as folder:
                    campaign.play(kind, Path(folder))
                campaign.keep()
    campaign.report("rollout_crashes").finish(None)
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
