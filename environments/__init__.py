# SPDX-License-Identifier: Apache-2.0
"""Environments: what can be launched, how it is prepared, and how its replicas are started.

    sources/       from what a user wrote to a program that runs
    venv/          the virtual environments of projects
    providers/     start replicas: as local processes
    spec.py        what was asked for: options, name, source
    names.py       which names are valid
    layout.py      where files are kept below the daemon's home
    run_files.py   one file for each replica; stops and restarts replicas
    http_get.py    asks an environment over HTTP
    following.py   one launch of an environment, through its restarts
    restart_policy.py
                   when a replica that exited is started again
    errors.py      what can go wrong

This file imports nothing: the command line reads `spec`, the daemon's settings `layout`.
"""
