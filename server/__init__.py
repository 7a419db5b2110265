# SPDX-License-Identifier: Apache-2.0
"""The daemon: HTTP API, dispatcher, reconciler, life cycle, log streams, metrics.

Where to look, in the order in which a request meets them:

    operations/     what the workers run: launch, scale, down, rollout, test, bench, …
    __main__.py     `python -m openenvd.server`: what `openenv up` starts
    daemon.py       the life cycle: lock, sockets, parts, serve, stop
      listening.py, assembly.py      its steps
    dashboard/      the page for a browser: its files, its stream
    api/            the FastAPI application: security, routes, streams, JSON shapes, metrics
    dispatch/       from an accepted payload to a durable request (submission.py); the one thread
                    that knows both the queue and the executor (dispatcher.py)
    tracing.py      spans of requests, sent if OpenTelemetry's variables ask for them
    events.py       the event bus; log files, followed without polling
    reconcile/      environments, from what is observed to what is wanted
    housekeeping.py  removes what nothing uses any more; the folder of sockets
    errors.py       the API's refusals, and why a daemon does not start

Each room may import those below it: dashboard, api, reconcile, dispatch, housekeeping and events
(pyproject's `server-layers`).

Settings are in `schema/settings.py`. This file imports nothing: workers need only operations.
"""
