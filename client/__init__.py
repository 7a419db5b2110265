# SPDX-License-Identifier: Apache-2.0
"""Talking to the daemon, with the standard library alone.

Where to look:

    http.py       one call over the Unix socket: JSON, text, server-sent events
    api.py        `DaemonClient`: the API's calls by name
    following.py  one request from where it stands to its end, across lost connections
    daemon.py     is there a daemon, start one, stop it
    upstream.py   `OpenEnvdProvider`, for upstream's `EnvClient.from_env(…, provider=…)`
    errors.py     what can go wrong

JSON stays JSON here: `cli` and programs read it as documented in `docs/api.md`. This file imports
nothing, so that each command pays for what it uses.
"""
