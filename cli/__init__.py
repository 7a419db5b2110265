# SPDX-License-Identifier: Apache-2.0
"""The command line: `openenv`, and the same as `openenvd`, a name that no other package has.

    entry.py        the entry point of the console scripts
    main.py         the command group, which turns errors into exit codes
    exit_codes.py   the exit code of each error and outcome
    commands/       a module for each command, or for those that share their options
    output/         what they print: tables, failures, durations, JSON
    following.py    queue a LONG request, leave it, or follow its log until Ctrl-C detaches
    options.py      shared by several commands: options, the connection, NAME|REQUEST_ID
    help_pages.py   examples; flags in groups, and `--set` for all other options
    completion.py   completion of words in shells
    passthrough.py  upstream's commands

Until a table is drawn, only the standard library and click are imported. No module here imports the
daemon: JSON comes from `client`, and states, settings and options from `schema`.
"""
