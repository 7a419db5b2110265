# SPDX-License-Identifier: Apache-2.0
"""The prefork supervisor of one environment: forks the processes that serve, and outlives them.

supervisor.py       serve, drain, end: one thread, one `select`, no event loop
acceptor.py         whether connections are accepted here, or left to peer replicas; their backlog
distributor.py      passes connections on to the shards
shard_pool.py       starts and stops shards as sessions come and go; what children report, and what
                    follows when one exits
context.py          what these three have in common
spawn.py            makes children, by a fork or as new programs
children.py         the children that run, and how one exited
memory.py           the process that each kill for memory hit; the memory of isolated sessions;
                    programs of the environment that were killed for memory, or left running
shard_policies.py   when shards are started, stopped and replaced, and when a replica sleeps
close_notices.py    copies of the children's sockets, and what is written to them at an exit
session_processes.py
                    sessions that have processes of their own
status_reporter.py  session counts, load and exits, for the shim
"""
