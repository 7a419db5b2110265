# SPDX-License-Identifier: Apache-2.0
"""Help pages that fit a screen: flags in groups, a line each, and `--set` for all other options.

An option that is rarely set is no flag. It keeps its name, type and help where it is declared, and
is given as `--set NAME=VALUE`; `--set help` prints the table of those that a command has.

Every command has examples, on its help page and on the site's page of commands; tests hold that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ..client.errors import ApiRefused
from ..system.text.options import Option, options_of
from ..system.text.units import near_matches
from .options import Command, help_of, type_of, word_of
from .output.output import Output

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Groups = Mapping[str, str]  # titles, each with its flags

SCREEN_LINES = 40
_YES_OR_NO = "yes|no"


class GroupedCommand(click.Command):
    """A command whose help page has its flags in groups, and the first sentence about each."""

    groups: ClassVar[Groups] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups below each other, without blank lines."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        rows = {option.opts[-1]: _row(option, ctx) for option in options}
        width = max(len(flags) for flags, _ in rows.values())
        formatter.write_paragraph()
        for title, words in self.groups.items():
            formatter.write_heading(title)
            with formatter.indentation():
                group = [rows[flag] for flag in words.split()]
                formatter.write_dl([(f"{flags:{width}}", text) for flags, text in group])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write as many examples as the screen has lines for, and one at least."""
        room = SCREEN_LINES - formatter.getvalue().count("\n")
        for line, purpose in EXAMPLES[ctx.command_path][: max(1, room)]:
            formatter.write(f"Example: {line}  # {purpose}\n")


def grouped(groups: Groups) -> type[GroupedCommand]:
    """Return the class of a command that has these groups."""
    return type("Grouped", (GroupedCommand,), {"groups": groups})


def _row(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    flags, _ = option.get_help_record(ctx) or ("", "")
    first, _, more = (option.help or "").rstrip(".").partition(". ")
    default = re.search(r" \[[^]]+\]$", more)  # at the end of all sentences
    return flags.replace(" / ", "/"), first + (default[0] if default else "")


class SetOption(click.Option):
    """`--set`, and the table of what it sets: options by the word that names them."""

    def __init__(self, names: list[str], table: Mapping[str, Option]) -> None:
        super().__init__(
            names,
            multiple=True,
            metavar="NAME=VALUE",
            expose_value=False,
            callback=self._set,
            shell_complete=self._complete,
            help="Any other option; --set help lists them. Repeatable.",
        )
        self.table = table

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, type and help of each option."""
        return [(word, _value_of(item), help_of(item)) for word, item in self.table.items()]

    def _set(self, ctx: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> None:
        """Add what was given to the parameters of the command, by the names of fields."""
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
            message = f"{word_of(item)}={_value_of(item)}: {exc.message}"
            raise click.BadParameter(message, ctx, self) from None

    def instead_of(self, flag: str) -> str | None:
        """Return how an option is given that is no flag; None: there is none of this name."""
        word = flag.removeprefix("--")
        if (item := self.table.get(word)) is not None:
            return f"--set {word}={_value_of(item)}"
        word = word.removeprefix("no-")
        item = self.table.get(word)
        return f"--set {word}=no" if item is not None and item.kind is bool else None

    def _complete(
        self, _ctx: click.Context, _parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [row for row in self.rows() if row[0].startswith(begun)]
        return [CompletionItem(f"{name}=", help=about) for name, _, about in found]


def set_option(*declarations: type, only: Collection[str]) -> Callable[[Command], Command]:
    """Give a command `--set`, for these options of what the dataclasses declare."""
    declared = [item for declaration in declarations for item in options_of(declaration)]
    table = {word_of(item): item for item in declared if item.name in only}

    return click.option("--set", cls=SetOption, table=table)


def set_option_of(command: click.Command) -> SetOption | None:
    """Return the `--set` of a command, if it has one."""
    return next((each for each in command.params if isinstance(each, SetOption)), None)


def in_words(refused: ApiRefused, command: click.Command) -> ApiRefused:
    """Name the options of a command in a refusal, in which the API names its fields."""
    words = {str(each.name): max(each.opts, key=len) for each in command.params if each.opts}
    if (of_it := set_option_of(command)) is not None:
        words |= {item.name: f"--set {word}" for word, item in of_it.table.items()}
    message = refused.message.removeprefix("body: ")
    # A field's name without `_` may be a plain word of the sentence, but where it begins one.
    for name, word in words.items():
        found = rf"\b{name}\b" if "_" in name else rf"^{name}(?=: )"
        message = re.sub(found, word, message)
    return ApiRefused(refused.status, {**refused.details, "message": message})


def _value_of(item: Option) -> str:
    """Return what a help page shows for the value."""
    return (
        _YES_OR_NO if item.kind is bool else item.metavar or type_of(item)[1] or item.kind.__name__
    )


Example = tuple[str, str]

EXAMPLES: dict[str, tuple[Example, ...]] = {
    "openenv": (
        ("openenv launch echo", "start the daemon, and an environment"),
        ("openenv status", "show what runs"),
        ("openenv rollout echo --out episodes", "play episodes in it"),
        ("openenv down echo", "take it down"),
    ),
    "openenv up": (
        ("openenv up", "start the daemon, if it does not run"),
        ("openenv up --port 9000 --max-long-workers 4", "with settings of its own"),
        ("openenv up --foreground", "for systemd and other service managers"),
    ),
    "openenv launch": (
        ("openenv launch echo", "a bundled environment"),
        ("openenv launch ./my_env --memory 2G", "a project's folder, with a memory limit"),
        ("openenv launch my_module:MyEnvironment -e API_KEY", "a class; $API_KEY is handed on"),
        ("openenv launch ./my_env --replicas 4 --gateway", "four replicas at one address"),
        ("openenv launch ./my_env --provider docker", "in a container"),
        ("openenv launch --async ./my_env", "print the request's id, and return"),
    ),
    "openenv rollout": (
        ("openenv rollout echo --out episodes --episodes 64", "random actions"),
        ("openenv rollout my_env --out out --policy my_policies:act", "a function of yours"),
        ("openenv rollout show episodes", "counts and rewards of what is in a folder"),
        ("openenv rollout my_env --out out --launch --group 8", "launch it first; groups for GRPO"),
    ),
    "openenv status": (
        ("openenv status", "environments and requests"),
        ("openenv status my_env", "one environment, with its replicas and generations"),
        ("openenv status --watch", "redrawn when something changes"),
        ("openenv status --json", "for programs"),
    ),
    "openenv dashboard": (("openenv dashboard", "sign a browser in, and open the page"),),
    "openenv address": (("openenv address my_env", "what `EnvClient(base_url=…)` takes"),),
    "openenv gateway": (("openenv gateway status", "its address and replicas"),),
    "openenv gateway status": (("openenv gateway status", "sessions and health of each replica"),),
    "openenv logs": (
        ("openenv logs -f my_env", "follow its youngest replica"),
        ("openenv logs --grep warning my_env echo", "the lines of two environments that match"),
        ("openenv logs --tail 100 7f3a91c2", "the end of a request's log"),
    ),
    "openenv requests": (
        ("openenv requests --state failed", "what failed"),
        ("openenv requests --environment my_env --limit 5", "the last ones of an environment"),
    ),
    "openenv wait": (
        ("openenv wait 7f3a91c2", "its outcome is the exit code"),
        ("openenv wait --timeout 5m 7f3a91c2", "exit code 124 where it has not ended by then"),
    ),
    "openenv retry": (
        ("openenv retry 7f3a91c2", "the same again"),
        ("openenv retry 7f3a91c2 --memory 2G", "with more memory, and all else as it was"),
    ),
    "openenv cancel": (
        ("openenv cancel 7f3a91c2", "one request"),
        ("openenv cancel 7f3a91c2 9b1d0c44", "several"),
    ),
    "openenv play": (
        ("openenv play echo", "a prompt with completion; `help` lists what can be typed"),
        ("openenv play --json echo", "the answers as JSON, a line each"),
    ),
    "openenv bench": (
        ("openenv bench benchmark", "32, 128 and 512 sessions at once, three times"),
        (
            'openenv bench my_env --requests-grid 64,1024 --action \'{"message": "hi"}\'',
            "other batches, an action of its own",
        ),
        (
            "openenv bench benchmark --wait-grid 1,5,10",
            "with steps that wait one, five and ten seconds",
        ),
    ),
    "openenv test": (
        ("openenv test ./my_env", "protocol, leaks, blocking steps, seeds"),
        ('openenv test ./my_env --action \'{"code": "1 + 1"}\'', "with an action of its own"),
        ("openenv test ./my_env --sessions 10000 --skip determinism", "look longer for leaks"),
    ),
    "openenv image": (("openenv image build ./my_env", "an image for engines"),),
    "openenv image build": (
        ("openenv image build ./my_env --tag registry.example.org/my_env:1", "to be pushed"),
        ("openenv image build ./my_env --base python:3.12", "on another image"),
    ),
    "openenv scale": (
        ("openenv scale my_env 4", "four replicas, at the same address"),
        ("openenv scale my_env 1 --drain-timeout 5m", "one; the others end with their sessions"),
    ),
    "openenv restart": (
        ("openenv restart my_env", "one replica after another, no session ends"),
        ("openenv restart my_env --replica 2", "one alone"),
    ),
    "openenv down": (
        ("openenv down my_env", "stop its replicas"),
        ("openenv down --all", "of all environments"),
    ),
    "openenv prune": (("openenv prune", "free the disk space of unused dependencies"),),
    "openenv stop": (("openenv stop", "environments continue"),),
    "openenv check": (
        ("openenv check", "what keeps this machine from its best"),
        ("openenv check --provider slurm --engine-option partition=cpu", "try a provider"),
    ),
    "openenv info": (("openenv info", "limits, plan and workers"),),
    "openenv config": (("openenv config", "each setting, and where it comes from"),),
    "openenv completion": (
        ("openenv completion bash", "print the script for ~/.bashrc"),
        ("openenv completion fish", "print the script for config.fish"),
    ),
}


def shown(path: str) -> str:
    r"""Return the examples of a command as a section of its help page; `\b`: not to be wrapped."""
    examples = EXAMPLES.get(path, ())
    width = max((len(line) for line, _ in examples), default=0)
    lines = [f"  {line:{width}}  # {purpose}" for line, purpose in examples]
    if width + max((len(purpose) for _, purpose in examples), default=0) > 84:
        lines = [text for line, purpose in examples for text in (f"  # {purpose}", f"  {line}")]
    return "\n".join(["\b", "Examples:", *lines])
