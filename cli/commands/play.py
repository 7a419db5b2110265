# SPDX-License-Identifier: Apache-2.0
"""`openenv play`: reset and step an environment by hand, at a prompt.

A line is a command of `_HELP`, or an action in one of three forms:

    {"message": "hi"}        JSON
    message=hi count=3       fields of the action's schema, quoted as in a shell
    hi there                 the value of the schema's only field, if that is text

Values are read by the types of their fields. The server checks the action, and names a wrong field.
If stdin is not a terminal, lines are read without a prompt, and the first error ends the command
with exit code 1.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import click

from ...client.errors import SessionError
from ...client.synchronous import Client
from ...rollouts.images import Image, take_images
from ...rollouts.play import FAILURES, CallFailed, Game
from ...rollouts.policies.random_policy import properties
from ...schema.settings import Paths
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from ...system.text.units import plural
from .. import completion, exit_codes
from ..output.output import Output, bad, faint

_HELP = """\
  ACTION               take a step: {"field": value}, field=value …, or the text of the only field
  step ACTION          the same, for an action that begins with the name of a command
  reset [seed=N …]     begin an episode
  random               take a step with an action that is drawn from the schema
  state, schema        print the environment's state, or the schema of its actions
  save FOLDER          add all episodes to a folder of rollouts
  save NAME.py [N]     save episode N, counted from 0, as a pytest; the last one without N
  help, quit           this; the end (Ctrl-D)"""
_COMMANDS = ("reset", "step", "random", "state", "schema", "save", "help", "quit")
_HISTORY_LINES = 1_000
_KITTY_CHUNK = 4_096  # characters of one escape sequence


def read_action(line: str, schema: Json) -> Json:
    """Parse an action from a line in any of the three forms; raises `CallFailed`."""
    fields = properties(schema)
    texts = [name for name, of in fields.items() if of.get("type") == "string"]
    if line.startswith("{"):
        try:
            action = json.loads(line)
        except ValueError as exc:
            raise CallFailed(f"no JSON: {exc}") from None
    elif len(fields) == 1 and texts and not line.startswith(f"{texts[0]}="):
        action = {texts[0]: line}
    else:
        action = read_fields(line, fields)
    if not isinstance(action, dict):
        raise CallFailed("an action is a JSON object: {…}")
    return action


def read_fields(line: str, fields: Json) -> Json:
    """Read `name=value …`, each value by the type of its field.

    Raises `CallFailed`: a word is not `name=value`, or a value is not of its field's type.
    """
    try:
        words = shlex.split(line)
    except ValueError as exc:
        raise CallFailed(f"{exc}: quote as in a shell") from None
    found = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            known = f"the fields are: {', '.join(fields)}" if fields else "or write a JSON object"
            raise CallFailed(f"{word!r} is not FIELD=VALUE; {known}")
        found[name] = _value(name, text, fields.get(name, {}))
    return found


def _value(name: str, text: str, schema: Json) -> Any:
    if schema.get("type") == "string" or ("enum" in schema and text in schema["enum"]):
        return text
    try:
        return json.loads(text)
    except ValueError:
        if schema.get("type") in ("integer", "number", "boolean", "array", "object"):
            raise CallFailed(f"{name}: {text!r} is not of type {schema['type']}") from None
        return text


def candidates(line: str, schema: Json) -> list[str]:
    """Return completions of a line's last word: commands, fields, values of an enum."""
    before, _, word = line.rpartition(" ")
    fields = properties(schema)
    name, equals, begun = word.partition("=")
    if equals:
        of = fields.get(name, {})
        values = of.get("enum") or (["true", "false"] if of.get("type") == "boolean" else [])
        return [f"{name}={value} " for value in map(str, values) if value.startswith(begun)]
    known = [f"{each}=" for each in fields]
    return [each for each in (known if before else [*_COMMANDS, *known]) if each.startswith(word)]


def shown_image(image: Image, environ: dict[str, str]) -> str | None:
    """Return the escape sequences that show an image; None if the terminal has none.

    Sources: iTerm2's inline images (also WezTerm); kitty's graphics protocol (also Ghostty), which
    accepts only PNG.
    """
    data, program = b64encode(image.data).decode(), environ.get("TERM_PROGRAM", "")
    if program in ("iTerm.app", "WezTerm"):
        return f"\x1b]1337;File=inline=1:{data}\a"
    is_kitty = "KITTY_WINDOW_ID" in environ or program == "ghostty"
    if not is_kitty or image.media_type != "image/png":
        return None
    parts = [data[at : at + _KITTY_CHUNK] for at in range(0, len(data), _KITTY_CHUNK)]
    return "".join(
        f"\x1b_G{'a=T,f=100,' if at == 0 else ''}m={int(at < len(parts) - 1)};{part}\x1b\\"
        for at, part in enumerate(parts)
    )


class _Prompt:
    """Carries out lines in a game, and prints the answers."""

    def __init__(self, game: Game, output: Output) -> None:
        self._game, self._output = game, output

    def carry_out(self, line: str) -> None:
        """Carry out a line; raises one of `FAILURES`."""
        word, _, rest = line.partition(" ")
        match word:
            case "help":
                self._output.result(_HELP)
            case "reset":
                answer = self._game.reset(read_fields(rest, {}))
                self._show(answer, f"episode {len(self._game.episodes)}, ")
            case "random":
                action = self._game.random_action()
                self._output.note(faint(json.dumps(action)))
                self._show(self._game.step(action))
            case "state":
                self._print(self._game.ask("state"))
            case "schema":
                self._print(self._game.schema)
            case "save":
                self._save(rest.strip())
            case _:
                action = read_action(rest if word == "step" else line, self._game.schema)
                self._show(self._game.step(action))

    def _save(self, where: str) -> None:
        if not where:
            raise CallFailed("save where? A folder, or a file NAME.py")
        path, _, number = where.rpartition(" ")
        if not (path.endswith(".py") and number.isdecimal()):
            path, number = where, ""
        saved = self._game.save(Path(path).expanduser(), int(number or -1))
        episodes, steps = plural(saved["episodes"], "episode"), plural(saved["steps"], "step")
        self._output.note(f"saved {episodes}, {steps}, in {path}")

    def _show(self, answer: Json, about: str = "") -> None:
        if self._output.as_json:
            self._output.json_line(answer)
            return
        observation, images = take_images(answer["observation"])
        self._print(observation)
        for _, image in images if sys.stdout.isatty() else ():
            if (shown := shown_image(image, dict(os.environ))) is not None:
                click.echo(shown)
        ended = ", the episode has ended" if answer["done"] else ""
        self._output.result(faint(f"{about}reward {answer['reward']}{ended}"))

    def _print(self, value: Any) -> None:
        self._output.result(plain(json.dumps(value, indent=2, ensure_ascii=False)))


def _lines(prompt: str, schema: Json) -> Iterator[str]:
    """Yield typed lines until Ctrl-D; Ctrl-C drops a line. The history is kept in the home."""
    import readline

    history = Paths.from_environment().home / "play_history"
    found: list[str] = []

    def complete(_word: str, number: int) -> str | None:
        if number == 0:
            found[:] = candidates(readline.get_line_buffer()[: readline.get_endidx()], schema)
        return found[number] if number < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    is_libedit = "libedit" in (readline.__doc__ or "")  # as on macOS
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    try:
        while True:
            try:
                yield input(prompt)
            except KeyboardInterrupt:
                click.echo()
            except EOFError:
                click.echo()
                return
    finally:
        with suppress(OSError):
            readline.write_history_file(history)


@click.command()
@click.argument("name", shell_complete=completion.usable_environments)
@click.option("--json", "as_json", is_flag=True, help="An answer as a line of JSON each.")
def play(name: str, as_json: bool) -> int:
    """Reset and step an environment by hand, at a prompt with completion.

    `help` lists what can be typed. What was played is saved as rollouts or as a pytest.

    Examples:
      openenv play echo         # a prompt; `help` lists what can be typed
      openenv play --json echo  # the answers as JSON, a line each
    """
    output = Output(as_json=as_json)
    environment = Client().environment(name)
    is_terminal = sys.stdin.isatty()
    try:
        opened = Game(environment.base_url(), name, str(environment.data["source"]))
    except FAILURES as exc:
        raise SessionError(f"{name} cannot be played: {exc}") from exc
    with closing(opened) as game:
        prompt = _Prompt(game, output)
        if is_terminal:
            fields = ", ".join(properties(game.schema)) or "actions without fields"
            output.note(f"{name}: {fields}", _HELP)
        for line in _lines(f"{name}> ", game.schema) if is_terminal else sys.stdin:
            if line.strip() == "quit":
                break
            try:
                if line.strip():
                    prompt.carry_out(line.strip())
            except FAILURES as exc:
                of = getattr(exc, "field", "")
                output.note(bad(plain(f"{of}: {exc}" if of else str(exc))))
                if not is_terminal:
                    return exit_codes.FAILED
            except KeyboardInterrupt:
                output.note("interrupted: the session has ended")
                return exit_codes.INTERRUPTED
    return exit_codes.OK
