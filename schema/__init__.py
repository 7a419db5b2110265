# SPDX-License-Identifier: Apache-2.0
"""Plain data that crosses a border between rooms or processes. Imports `system` alone.

settings.py           every setting of the daemon, declared once
layout.py             where files are below the daemon's home
spec.py               what was asked for at a launch: options, name (and which are valid), source
protocol.py           what the env host and what starts it tell each other
operation_options.py  the options of the other operations
states.py             the states of requests, environments and replicas, and their transitions
errors.py             what can go wrong with an environment
"""
