# SPDX-License-Identifier: Apache-2.0
"""Records `docs/images/terminal.svg`, the README's picture: real commands in a pseudo terminal.

    PATH=$PWD/.venv/bin:$PATH uv run --no-project --with pyte python docs/record_terminal.py

The script runs `SCENE` with a new home, keeps every state of the screen with its time, and draws
the states as one animated SVG. Commands are typed at a steady pace, and a pause longer than
`MAX_PAUSE_SECONDS` is shortened; nothing else is changed. A reader who prefers reduced motion sees
the last state.
"""

from __future__ import annotations

import html
import os
import pty
import select
import subprocess
import tempfile
import time
from pathlib import Path

import pyte

TARGET = Path(__file__).parent / "images" / "terminal.svg"
COLUMNS, ROWS = 88, 24
CELL_WIDTH, LINE_HEIGHT, MARGIN, BAR = 8.0, 18, 14, 30
TYPED_SECONDS = 0.035  # a character
MAX_PAUSE_SECONDS = 1.2
END_SECONDS = 6.0
FRAME_SECONDS = 0.12  # the shortest that a state is shown
PROMPT = "\x1b[32m$\x1b[0m "
FONTS = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
FILES = {
    "hungry.py": """\
from openenvd import Environment, Observation


class Hungry(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    eaten = b""

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def step(self, action, timeout_s=None, **kwargs):
        self.eaten = b"x" * (500 << 20)  # 500 MB
        return Observation()

    state = None
""",
    "play.py": """\
import sys
from openenvd import Client

with Client().environment(sys.argv[1]).connect() as env:
    env.reset()
    print(env.step({"message": "hello"} if sys.argv[1] == "echo" else {}).observation)
""",
}
CLEAR = "clear"
SCENE = (
    "openenv launch echo",
    "python play.py echo",
    "openenv rollout echo --episodes 256 --policy random --out episodes",
    CLEAR,
    "openenv launch hungry:Hungry --memory 300M",
    "python play.py hungry 2>&1 | tail -n 2",
    "openenv status hungry",
)
COLOURS = {
    "default": "#d8dee9", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341",
    "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": "#f0f6fc",
    "black": "#6e7681",
}  # fmt: skip
State = list[list[tuple[str, str, bool]]]  # of each row: text, colour, whether it is bold


class Recording:
    """The screen, and each of its states with how long it was seen."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self.states: list[tuple[float, State]] = []

    def feed(self, data: bytes, seconds: float) -> None:
        """Show some output; the state before it was seen for this long."""
        if self.states:
            last, state = self.states[-1]
            self.states[-1] = (last + min(seconds, MAX_PAUSE_SECONDS), state)
        self._stream.feed(data.replace(b"\n", b"\r\n") if b"\r\n" not in data else data)
        found = [_runs(self.screen.buffer[row]) for row in range(ROWS)]
        if not self.states or found != self.states[-1][1]:
            if self.states and self.states[-1][0] < FRAME_SECONDS:
                self.states[-1] = (self.states[-1][0], found)
            else:
                self.states.append((0.0, found))


def _runs(line: dict[int, pyte.screens.Char]) -> list[tuple[str, str, bool]]:
    """Join the cells of a row that look alike."""
    runs: list[tuple[str, str, bool]] = []
    for column in range(COLUMNS):
        cell = line[column]
        colour = COLOURS.get(cell.fg, COLOURS["default"])
        if runs and runs[-1][1:] == (colour, cell.bold):
            runs[-1] = (runs[-1][0] + cell.data, colour, cell.bold)
        else:
            runs.append((cell.data, colour, cell.bold))
    while runs and not runs[-1][0].rstrip():
        runs.pop()
    return [*runs[:-1], (runs[-1][0].rstrip(), *runs[-1][1:])] if runs else []


def play(recording: Recording, command: str, folder: Path, environ: dict[str, str]) -> None:
    """Type a command, run it in a pseudo terminal, and record what it prints."""
    if command == CLEAR:
        recording.feed(b"\x1b[2J\x1b[H", 3.0 * MAX_PAUSE_SECONDS)
        return
    recording.feed(PROMPT.encode(), 0)
    for character in command:
        recording.feed(character.encode(), TYPED_SECONDS)
    recording.feed(b"\r\n", 0.4)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    before = time.monotonic()
    while True:
        select.select([ours], [], [])
        try:
            data = os.read(ours, 65536)
        except OSError:  # the command has closed its terminal
            break
        if not data:
            break
        now = time.monotonic()
        recording.feed(data, now - before)
        before = now
    os.close(ours)
    process.wait()
    recording.feed(b"\r\n", 0.3)


def draw(states: list[tuple[float, State]]) -> str:
    """Draw the states as a film that moves up by one state at a time."""
    states[-1] = (END_SECONDS, states[-1][1])
    total = sum(seconds for seconds, _ in states)
    used = max(n for _, state in states for n, row in enumerate(state, 1) if row)
    width = COLUMNS * CELL_WIDTH + 2 * MARGIN
    height = used * LINE_HEIGHT + 2 * MARGIN
    lines: dict[str, int] = {}
    frames, moves, at = [], [], 0.0
    for number, (seconds, state) in enumerate(states):
        uses = []
        for row, runs in enumerate(state[:used]):
            if runs:
                key = lines.setdefault("".join(map(_span, runs)), len(lines))
                uses.append(f'<use href="#l{key}" y="{row * LINE_HEIGHT}"/>')
        frames.append(f'<g transform="translate(0 {number * height})">{"".join(uses)}</g>')
        moves.append(f"{100 * at / total:.3f}%{{transform:translateY({-number * height}px)}}")
        at += seconds
    last = f"transform:translateY({-(len(states) - 1) * height}px)"
    defined = "".join(
        f'<text id="l{n}" y="{LINE_HEIGHT}" xml:space="preserve">{line}</text>'
        for line, n in lines.items()
    )
    dots = "".join(
        f'<circle cx="{16 + 18 * n}" cy="{BAR / 2}" r="5.5" fill="{colour}"/>'
        for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height + BAR}" \
viewBox="0 0 {width:g} {height + BAR}" role="img" aria-label="{html.escape("; ".join(SCENE))}">
<style>
text{{font:13.3px {FONTS};fill:{COLOURS["default"]}}}
.film{{animation:film {total:.2f}s steps(1,end) infinite}}
@keyframes film{{{"".join(moves)}100%{{{last}}}}}
@media (prefers-reduced-motion:reduce){{.film{{animation:none;{last}}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="#161b22"/>{dots}
<defs>{defined}</defs>
<svg x="{MARGIN}" y="{BAR}" width="{width - 2 * MARGIN:g}" height="{height}">
<g class="film">{"".join(frames)}</g></svg></svg>
"""


def _span(run: tuple[str, str, bool]) -> str:
    text, colour, is_bold = run
    style = f' fill="{colour}"' * (colour != COLOURS["default"])
    style += ' font-weight="bold"' * is_bold
    length = f' textLength="{len(text) * CELL_WIDTH:g}" lengthAdjust="spacing"'
    return f"<tspan{style}{length}>{html.escape(text)}</tspan>"


def main() -> None:
    """Record the scene, and write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "demo")
        folder.mkdir()
        for file, text in FILES.items():
            (folder / file).write_text(text)
        environ = {**os.environ, "OPENENV_HOME": name + "/home", "TERM": "xterm-256color"}
        environ |= {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        recording = Recording()
        try:
            for command in SCENE:
                play(recording, command, folder, environ)
        finally:
            for command in ("down --all", "stop"):
                subprocess.run(["openenv", *command.split()], env=environ, check=False)
    TARGET.write_text(draw(recording.states))


if __name__ == "__main__":
    main()
