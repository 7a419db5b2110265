# SPDX-License-Identifier: Apache-2.0
"""Plain data that crosses a border between rooms or processes. Imports `system` alone.

settings.py           every setting of the daemon, declared once
layout.py             where files are below the daemon's home
spec.py               the request of a launch: options, source, name (and the check of names)
protocol.py           the protocol between the env host and the process that starts it
operation_options.py  the options of the other operations
states.py             the states of requests, environments and replicas, and their transitions
errors.py             the errors of an environment
"""
