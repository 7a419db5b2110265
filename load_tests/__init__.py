# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs that print a table and write JSON. Nothing imports them.

    python -m load_tests.cold_cli        a cold `openenv status` against `import click`
    python -m load_tests.idle_memory     PSS of everything, idle
    python -m load_tests.launch          request to ready, and the return of `--async`
    python -m load_tests.run_short       the short form of all of them

Each takes `--repetitions N` and `--json FILE`, and states the machine and the spread. Machines
differ and are noisy: quote ratios and medians.
"""
