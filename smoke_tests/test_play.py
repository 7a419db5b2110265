# SPDX-License-Identifier: Apache-2.0
"""`openenv play` in a real terminal and in a pipe; played steps are saved and replayed."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

from openenvd.rollouts.folder.readers import open_rollouts

from .conftest import OPENENV, Machine


def test_what_was_played_is_saved_as_a_rollout_and_as_a_test(
    machine: Machine, tmp_path: Path
) -> None:
    machine.ok("launch", "echo")
    lines = (
        "reset seed=3/hi there/random/reset/x/save played/save test_played.py 0/step reset/m=1 x=2"
    )
    done = subprocess.run(
        [OPENENV, "play", "echo", "--json"], input=lines.replace("/", "\n"),
        env=machine.environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answers[1]["reward"], answers[5]["observation"]["echoed_message"]] == [0.8, "reset"]
    assert done.returncode == 0  # for echo, whose only field is text, the last line is text, too
    episode, _ = open_rollouts(tmp_path / "played")
    assert next(iter(episode.steps())).action == {"message": "hi there"}
    assert (episode.row["seed"], episode.row["steps"]) == (3, 2)
    again = [sys.executable, "-m", "pytest", "-q", "--openenv-source=echo", "test_played.py"]
    subprocess.run(again, env=machine.environ, cwd=tmp_path, check=True, timeout=120)


def test_an_environment_is_played_at_a_prompt(machine: Machine) -> None:
    machine.ok("launch", "benchmark")
    ours, theirs = pty.openpty()
    playing = subprocess.Popen(
        [OPENENV, "play", "benchmark"], env=machine.environ | {"TERM": "xterm"},
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def read_until(words: bytes) -> None:
        nonlocal seen
        while words not in seen:
            seen += os.read(ours, 65536)
        seen = seen.rpartition(words)[2]

    try:
        read_until(b"benchmark> ")
        os.write(ours, b"wait\t")  # completed to the name of the field
        read_until(b"wait_seconds=")
        os.write(ours, b"x\n")
        read_until(b"'x' is not of type number")
        os.write(ours, b"reset\n")
        read_until(b"reward")
        os.write(ours, b"wait\x03")  # Ctrl-C drops the line
        os.write(ours, b"wait_seconds=0\n")
        read_until(b"reward")
        read_until(b"benchmark> ")
        os.write(ours, b"\x04")
        assert playing.wait(30) == 0
    finally:
        playing.kill()
        playing.wait()
        os.close(ours)
