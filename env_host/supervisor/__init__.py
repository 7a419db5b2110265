# SPDX-License-Identifier: Apache-2.0
"""The prefork supervisor of one environment: forks the processes that serve, and outlives them.

supervisor.py       the agenda: one thread, one `select`, no event loop
spawn.py            makes children, by a fork or as new programs
children.py         the children that run
exits.py            how a child exited, in words and as facts for shim and agent
server_memory.py    which kills for memory were of which process
abandoned_steps.py  when a shard is replaced whose step runs although its session has ended
left_programs.py    programs that ended sessions have left behind
close_notices.py    copies of the children's sockets, and what is written to them at an exit
isolated_sessions.py
                    sessions that have processes of their own
session_memory.py   what such a session holds, and its cap
status_reporter.py  session counts and load, for the shim
"""
