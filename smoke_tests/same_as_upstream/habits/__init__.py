# SPDX-License-Identifier: Apache-2.0
"""All habits, in the order of the table."""

from importlib import import_module

from .habit import Habit, habits_in

# By the heading of the table.
MODULES = {
    "answers": "Observations and other answers",
    "errors": "Errors and ends",
    "processes": "Processes",
    "threads": "Threads and loops",
    "coroutines": "Asynchronous steps",
    "process_state": "State of the process",
    "imports": "Modules and imports",
    "forms": "Sessions, factories and apps",
}


def all_habits() -> list[Habit]:
    """Every habit, module by module."""
    modules = [import_module(f".{name}", __package__) for name in MODULES]
    return [each for module in modules for each in habits_in(module.Habits)]
