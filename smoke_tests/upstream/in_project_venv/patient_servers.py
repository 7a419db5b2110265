# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: upstream's tests wait longer than 10 s for a server that they start.

On a busy machine the import of gradio alone takes longer. Their `run_server` then hangs instead of
failing, because it reads the errors of a server that continues.
"""

from typing import Any

START_SECONDS = 60.0


def pytest_collection_finish(session: Any) -> None:
    """Change the default of `run_server` in each module that has one."""
    for module in {item.module for item in session.items}:
        if function := getattr(getattr(module, "run_server", None), "__wrapped__", None):
            function.__defaults__ = tuple(
                START_SECONDS if isinstance(value, float) else value
                for value in function.__defaults__
            )
