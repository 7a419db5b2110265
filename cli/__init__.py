# SPDX-License-Identifier: Apache-2.0
"""The command line: `openenv`, and `openenvd`, the same under a name no other package has.

    entry.py        what the console scripts call
    main.py         the command group, and where errors become exit codes
    exit_codes.py   the exit codes, and which error or outcome has which
    up.py           up, stop, info, config
    check.py        check
    launch.py       launch
    scale.py        scale, restart
    rollout.py      rollout
    bench.py        bench
    test.py         test
    status.py       status
    addresses.py    address, dashboard, gateway status
    watch.py        status --watch
    requests.py     requests, wait, retry, cancel
    logs.py         logs
    image.py        image build
    down.py         down, prune
    following.py    queue a LONG request, leave it, or follow its log; what Ctrl-C does to it
    failures.py     a failure with its evidence, the same block everywhere
    output.py       stdout and stderr, JSON and text
    drawing.py      tables and lines, colour
    phrases.py      durations and sizes for people
    options.py      what several commands share: options, the connection, NAME|REQUEST_ID
    option_groups.py  flags in groups, and `--set` for all other options
    completion.py   what shells complete
    examples.py     examples of every command
    passthrough.py  upstream's commands

Standard library and click until a table is drawn. Nothing here knows the daemon's insides: JSON
comes from `client`, states from `requests_db.states`, settings from `server.settings`, options from
`environments.spec` and `operations.options`.
"""
