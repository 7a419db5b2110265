# SPDX-License-Identifier: Apache-2.0
"""What a person types: `openenv`, and `openenvd`, the same under a name nobody else owns.

Where to look:

    main.py         the command group, and where errors become exit codes
    exit_codes.py   the exit codes, and which error or outcome has which
    up.py           up, stop, info, check
    launch.py       launch; source.py says what is launched and what it is called
    rollout.py      rollout
    bench.py        bench; progress_bar.py draws how far it is
    status.py       status; tables.py draws environments and requests
    requests.py     requests, wait, cancel
    logs.py         logs
    down.py         down
    following.py    a request's log with a spinner, and what Ctrl-C does to it
    queued.py       a LONG request that a command has queued: left, or followed to its end
    lookup.py       NAME|REQUEST_ID: which was meant
    failures.py     a failure with its evidence, the same block everywhere
    output.py       stdout and stderr, JSON and text, colour
    phrases.py      durations and sizes for people
    options.py      what several commands share
    passthrough.py  upstream's commands

Standard library and click until a table is drawn. Nothing here knows the daemon's insides: JSON
comes from `client`, states from `requests_db.states`, settings from `server.settings`.
"""
