# SPDX-License-Identifier: Apache-2.0
"""Help pages that fit a screen: flags in groups, a line each, and `--set` for all other options.

`-h` shows the flags of a first launch or rollout on one screen, `--help` all flags and examples.
A rarely used option has no flag. It keeps the name, type and help of its declaration, and is given
as `--set NAME=VALUE`; `--set help` prints the table of a command's options of this kind.

Every command has examples at the end of its docstring (`main.end_with_examples`); a test checks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import click

from ..client.errors import ApiRefused
from ..system.text.options import Option, options_of
from ..system.text.units import near_matches
from .options import Command, help_of, type_of, word_of
from .output.output import Output

Groups = Mapping[str, str]  # titles, each with its flags; `-h` shows those before a `|`

SCREEN_LINES = 23  # of `-h`: with the prompt, the 24 lines of a terminal
_IS_SHORT = f"{__name__}.is_short"  # in the context's `meta`
_HELP = ("-h, --help", "Show the most used options (-h), or all (--help)")
_YES_OR_NO = "yes|no"


class GroupedCommand(click.Command):
    """A command whose help page shows its flags in groups, each with its first sentence."""

    groups: ClassVar[Groups] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, which say how long the help page is."""
        ctx.meta[_IS_SHORT] = "--help" not in args
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups below each other, without blank lines."""
        is_short = ctx.meta.get(_IS_SHORT)
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        rows = {option.opts[-1]: _row(option, ctx) for option in options} | {"--help": _HELP}
        width = max(len(flags) for flags, _ in rows.values())
        for title, words in self.groups.items():
            shown, _, others = words.partition("|")
            group = [rows[flag] for flag in (shown if is_short else shown + others).split()]
            if group:
                formatter.write_heading(title)
                with formatter.indentation():
                    formatter.write_dl([(f"{flags:{width}}", text) for flags, text in group])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples: with `-h` as many as fit the screen, at least one."""
        if not ctx.meta.get(_IS_SHORT):
            super().format_epilog(ctx, formatter)
            return
        room = SCREEN_LINES - formatter.getvalue().count("\n")
        examples = (self.epilog or "").splitlines()[2:]  # after `\b` and the heading
        for line in examples[: max(1, room)]:
            formatter.write(f"Example: {line.strip()}\n")


def grouped(groups: Groups) -> type[GroupedCommand]:
    """Return the class of a command that has these groups."""
    return type("Grouped", (GroupedCommand,), {"groups": groups})


def _row(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    flags, _ = option.get_help_record(ctx) or ("", "")
    first, _, more = (option.help or "").rstrip(".").partition(". ")
    default = re.search(r" \[[^]]+\]$", more)  # at the end of all sentences
    return flags.replace(" / ", "/"), first + (default[0] if default else "")


class SetOption(click.Option):
    """`--set`, with the table of its options by the word that names them."""

    def __init__(self, names: list[str], table: Mapping[str, Option]) -> None:
        super().__init__(
            names,
            multiple=True,
            metavar="NAME=VALUE",
            expose_value=False,
            callback=self._set,
            help="Any other option; --set help lists them. Repeatable.",
        )
        self.table = table

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, type and help of each option."""
        return [(word, _value_of(item), help_of(item)) for word, item in self.table.items()]

    def _set(self, ctx: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> None:
        """Add the given values to the parameters of the command, by the names of fields."""
        if "help" in texts:
            formatter = ctx.make_formatter()
            formatter.write_dl([(f"{name}={kind}", about) for name, kind, about in self.rows()])
            output: Output = ctx.params["output"]
            output.result(formatter.getvalue().rstrip())
            output.json(
                [dict(zip(("name", "value", "help"), row, strict=True)) for row in self.rows()]
            )
            ctx.exit()
        for text in texts:
            name, _, value = text.partition("=")
            word = name.replace("_", "-")
            item = self.table.get(word)
            if item is None:
                raise click.BadParameter(self._unknown(word, ctx), ctx, self)
            if not value.strip():
                raise click.BadParameter(f"write {word}={_value_of(item)}", ctx, self)
            ctx.params[item.name] = self._read(item, value, ctx)

    def _unknown(self, word: str, ctx: click.Context) -> str:
        if any(f"--{word}" in option.opts for option in ctx.command.params):
            return f"{word} has an option of its own; write --{word}"
        _, hint = near_matches(word, self.table, "--set help lists them")
        return f"no option is called {word!r}; {hint}"

    def _read(self, item: Option, value: str, ctx: click.Context) -> Any:
        kind = click.BOOL if item.kind is bool else click.types.convert_type(type_of(item)[0])
        try:
            return kind.convert(value, self, ctx)
        except click.BadParameter as exc:
            why = f"{value!r} is neither" if item.kind is bool else exc.message
            message = f"{word_of(item)}={_value_of(item)}: {why}"
            raise click.BadParameter(message, ctx, self) from None

    def instead_of(self, flag: str) -> str | None:
        """Return the `--set` form of an option without a flag; None: there is no such option."""
        word = flag.removeprefix("--")
        if (item := self.table.get(word)) is not None:
            return f"--set {word}={_value_of(item)}"
        item = self.table.get(word := word.removeprefix("no-"))
        return f"--set {word}=no" if item is not None and item.kind is bool else None


def set_option(*declarations: type, only: Collection[str]) -> Callable[[Command], Command]:
    """Give a command `--set`, for some options that the dataclasses declare."""
    declared = [item for declaration in declarations for item in options_of(declaration)]
    table = {word_of(item): item for item in declared if item.name in only}

    return click.option("--set", cls=SetOption, table=table)


def set_option_of(command: click.Command) -> SetOption | None:
    """Return the `--set` of a command, if it has one."""
    return next((each for each in command.params if isinstance(each, SetOption)), None)


def in_words(refused: ApiRefused, command: click.Command) -> ApiRefused:
    """Replace the API's field names in a refusal by the options of a command."""
    words = {str(each.name): max(each.opts, key=len) for each in command.params if each.opts}
    if (of_it := set_option_of(command)) is not None:
        words |= {item.name: f"--set {word}" for word, item in of_it.table.items()}
    message = refused.message.removeprefix("body: ")
    # A field's name without `_` may be a plain word, except at the beginning of a sentence.
    for name, word in words.items():
        found = rf"\b{name}\b" if "_" in name else rf"^{name}(?=: )"
        message = re.sub(found, word, message)
        if name.endswith("_mb") and message.startswith(f"{word}: Input should"):
            message += " MB"
    return ApiRefused(refused.status, {**refused.details, "message": message})


def _value_of(item: Option) -> str:
    shown = item.metavar or type_of(item)[1] or item.kind.__name__
    return _YES_OR_NO if item.kind is bool else shown
