# SPDX-License-Identifier: Apache-2.0
"""The conversations of `conversations.yaml`, which explains its entries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("conversations.yaml")
GENERATED = "generated"  # by `openenv init`, in any version


@dataclass(frozen=True)
class Conversation:
    """The calls of one session, and what the environment's image has beside its packages."""

    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    is_stateless: bool = False  # a server answers a later session like the first one

    def variables_of(self, project: Path, data: Path) -> dict[str, str]:
        """Return the variables that the environment's image or upstream's tests set."""
        values = {"project": project, "data": data}
        return {name: text.format(**values) for name, text in self.variables.items()}

    def write_files(self, data: Path) -> None:
        """Write the files into the folder `data`."""
        for name, text in self.files.items():
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            (data / name).write_text(text)


def read_conversations() -> dict[str, Conversation]:
    """Return the conversations by the name of the environment."""
    found = {}
    for name, entry in yaml.safe_load(FILE.read_text()).items():
        named = ({each: {}} if isinstance(each, str) else each for each in entry.pop("calls"))
        calls = tuple(call for each in named for call in each.items())
        packages = tuple(entry.pop("packages", ()))
        found[name] = Conversation(calls, packages=packages, **entry)
    return found
