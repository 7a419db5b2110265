# SPDX-License-Identifier: Apache-2.0
"""The short form of every load test: checks that it runs, and prints figures. No thresholds.

python -m load_tests.run_short [--half SEED]
"""

import argparse
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

AT_ONCE = 3  # programs: they mostly wait, and their figures are not kept
PROGRAMS = (  # the longest first; the stage `dashboard` runs the one with Chromium
    ("failures.changing_replicas", 1, "--short --parts updates"),
    ("failures.changing_replicas", 1, "--short --parts autoscaling"),
    ("rollouts", 1, "--short --sizes 1000 100000"),
    ("failures.worlds", 1, "--short"),
    ("failures.changes", 1, "--short"),
    ("failures.rollout_crashes", 1, "--short"),
    ("scaling", 1, "--provider slurm --requests-grid 256"),
    ("scaling", 1, "--short"),
    ("steps", 1, "--short --alone"),  # another stage tries upstream
    ("scaling", 1, "--provider gateway --requests-grid 256"),
    ("steps", 1, "--short --gateway --shapes async"),
    ("held_sessions", 1, "--gateway --sessions 256"),
    ("held_sessions", 1, "--short"),
    ("nearly_full", 1, "--replicas 8 --sessions 100"),
    ("growth", 1, "--parts replicas --most 20 --seconds 1"),
    ("growth", 1, "--parts failed collect --most 1000"),
    ("idle_cost", 1, "--environments 4 --seconds 3 --settle 3"),
    ("idle_cost", 1, "--parts daemon burst --requests 20 --seconds 3"),
    ("low_resources", 1, "--sizes small --parts a --most 4"),
    ("brigade", 1, "--short"),
    ("queue_dispatcher", 1, "--requests 1000"),
    ("queue_dispatcher", 1, "--requests 500 --executor workers"),
    ("short_requests", 1, "--single 50 --burst 200"),
    ("launch", 2, "--parts asleep"),
    ("launch", 1, "--parts awake"),
    ("cold_cli", 2, ""),
)


def run(name: str, repetitions: int, more: str) -> tuple[str, int]:
    """Run one program; returns its output with its seconds, and its exit code."""
    command = [sys.executable, "-m", f"load_tests.{name}", "--repetitions", str(repetitions)]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *more.split()],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return f"{done.stdout}  ({name}: {time.monotonic() - started:.0f} s)\n", done.returncode


def main() -> int:
    """Run the programs, print the output of each when it ends, and stop after a failure."""
    parser = argparse.ArgumentParser(prog="load_tests.run_short")
    parser.add_argument("--half", type=int, metavar="SEED", help="half of them, drawn by this seed")
    seed = parser.parse_args().half
    drawn = random.Random(seed).sample(PROGRAMS, -(-len(PROGRAMS) // 2))
    programs = PROGRAMS if seed is None else [each for each in PROGRAMS if each in drawn]
    for left_out in (each for each in PROGRAMS if each not in programs):
        print(f"left out  {left_out[0]} {left_out[2]}")
    codes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [pool.submit(run, *program) for program in programs]
        for done in as_completed(runs):
            if done.cancelled():
                continue
            output, code = done.result()
            print(output, flush=True)
            codes.append(code)
            if code != 0:
                for other in runs:
                    other.cancel()
    return next((code for code in codes if code != 0), 0)  # below 0: a signal has ended it


if __name__ == "__main__":
    sys.exit(main())
