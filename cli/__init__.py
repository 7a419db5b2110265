# SPDX-License-Identifier: Apache-2.0
"""The command line: `openenv`, and `openenvd`, the same under a name no other package has.

    entry.py        what the console scripts call
    main.py         the command group, and where errors become exit codes
    exit_codes.py   the exit codes, and which error or outcome has which
    commands/       a module for each command, or for those that share their options
    output/         what they print: tables, failures, durations, JSON
    following.py    queue a LONG request, leave it, or follow its log; what Ctrl-C does to it
    options.py      what several commands share: options, the connection, NAME|REQUEST_ID
    help_pages.py   examples; flags in groups, and `--set` for all other options
    completion.py   what shells complete
    passthrough.py  upstream's commands

Standard library and click until a table is drawn. Nothing here knows the daemon: JSON comes from
`client`, and states, settings and options from `schema`.
"""
