# SPDX-License-Identifier: Apache-2.0
"""`sdk/options.py`, generated from where options are declared.

python tests/repository/sdk_options.py      write the module
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from openenvd.environments.spec import LaunchOptions
from openenvd.operations.options import DrainOptions, RequestOptions, RolloutOptions
from openenvd.system.options import Option, options_of

MODULE = Path(__file__).resolve().parents[2] / "sdk" / "options.py"
LINE = 100
INDENT = "    "
ONLY_ON_THE_COMMAND_LINE = (
    (r" Repeatable\.$", ""),
    (r": \d[\w.]*(, \d[\w.]*)*\.", "."),  # examples with units
    (r" Without a value, the one it has here\.", ""),
    (r", @FILE reads it", ""),
    (r"`--([a-z-]+)`", r"`\1`"),
)

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of the SDK: the options of launches, rollouts and drains, and of any request.

Generated from where they are declared: `python tests/repository/sdk_options.py`.
"""

from __future__ import annotations

from typing import Any, TypedDict
'''
CLASSES = (
    ("RequestOptions", "TypedDict", RequestOptions, "How a request is queued and run."),
    ("DrainOptions", "RequestOptions", DrainOptions, "How replicas that are taken away end."),
    ("LaunchOptions", "DrainOptions", LaunchOptions, "How an environment is started."),
    ("RolloutOptions", "RequestOptions", RolloutOptions, "How episodes are played and written."),
)


def render() -> str:
    """Return the whole module."""
    return "\n\n".join([HEAD, *(_class(*each) for each in CLASSES)])


def _class(name: str, base: str, declaration: type, summary: str) -> str:
    lines = [f"class {name}({base}, total=False):", f'    """{summary}"""']
    for each in options_of(declaration):
        lines += ["", f"    {each.name}: {_annotation(each.annotation)}"]
        text = f'"""{_about(each)}"""'
        lines += textwrap.wrap(text, LINE, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines) + "\n"


def _about(each: Option) -> str:
    """Return the help of an option without what is the command line's."""
    about = each.help
    for pattern, instead in ONLY_ON_THE_COMMAND_LINE:
        about = re.sub(pattern, instead, about)
    about = about.removesuffix(".")
    if each.name.endswith("_mb"):
        about += ". In MB (2**20 bytes)"
    if each.name.endswith("_seconds"):
        about += ". In seconds"
    if each.choices:
        about += f": {', '.join(each.choices)}"
    return f"{about}." if each.default in (None, False, [], {}) else f"{about} [{each.default}]."


def _annotation(annotation: Any) -> str:
    return (
        annotation.__name__
        if isinstance(annotation, type)
        else str(annotation).replace("typing.", "")
    )


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(render(), end="")
    else:
        MODULE.write_text(render())
