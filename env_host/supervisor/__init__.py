# SPDX-License-Identifier: Apache-2.0
"""The prefork supervisor of one environment: forks the processes that serve, and outlives them.

supervisor.py       the agenda: one thread, one `select`, no event loop
spawn.py            makes children, by a fork or as new programs
children.py         the children that run
exits.py            how a child exited, in words and as facts for the shim
close_notices.py    copies of the children's sockets, and what is written to them at an exit
isolated_sessions.py
                    sessions that have processes of their own
session_memory.py   what such a session holds, and its cap
status_reporter.py  session counts and load, for the shim
"""
