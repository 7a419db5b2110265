# SPDX-License-Identifier: Apache-2.0
"""`client/options.py`, generated from where options are declared.

python tests/repository/sdk_options.py      write the module
"""

import sys
from pathlib import Path
from typing import Any

from openenvd.schema.operation_options import DrainOptions, RequestOptions, RolloutOptions
from openenvd.schema.spec import LaunchOptions
from openenvd.system.text.options import options_of

MODULE = Path(__file__).resolve().parents[2] / "client" / "options.py"

HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of the SDK: the options of launches, rollouts and drains, and of any request.

Names, meanings and defaults are those of the commands: `openenv launch --help`, and `--set help`.
Generated from where they are declared: `python tests/repository/sdk_options.py`.
"""

from __future__ import annotations

from typing import Any, TypedDict
'''
CLASSES = (
    ("RequestOptions", "TypedDict", RequestOptions, "The options of any request."),
    ("DrainOptions", "RequestOptions", DrainOptions, "The options for stopping replicas."),
    ("LaunchOptions", "DrainOptions", LaunchOptions, "The options of a launch."),
    ("RolloutOptions", "RequestOptions", RolloutOptions, "The options of a rollout."),
)


def render() -> str:
    return "\n\n".join([HEAD, *(_class(*each) for each in CLASSES)])


def _class(name: str, base: str, declaration: type, summary: str) -> str:
    lines = [f"class {name}({base}, total=False):", f'    """{summary}"""', ""]
    lines += [
        f"    {each.name}: {_annotation(each.annotation)}" for each in options_of(declaration)
    ]
    return "\n".join(lines) + "\n"


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
