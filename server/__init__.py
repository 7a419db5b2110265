# SPDX-License-Identifier: Apache-2.0
"""The daemon: HTTP API, dispatcher, reconciler, life cycle, log streams, metrics.

Where to look, in the order in which a request meets them:

    settings.py        every setting, declared once; where files are (the CLI imports this alone)
    __main__.py        `python -m openenvd.server`: what `openenv up` starts
    daemon.py          the life cycle: lock, recovery, start, stop
    security.py        token, Host and Origin, before anything else looks at a call
    api.py             the FastAPI application; routes in routes_*.py, JSON shapes in views.py
    services.py        what the handlers work with
    submission.py      from an accepted payload to a durable request
    dispatcher.py      the one thread that knows both the queue and the executor
    bus.py             wakes whoever waits for an event
    log_streams.py     log files, followed without polling
    reconciler.py      environments as they are against environments as they are wanted; what it
                       decides is in next_step.py, and its docstring names those who help
    socket_folder.py   where sockets are, made, held and collected

This file imports nothing: `settings` must stay cheap to import.
"""
