# SPDX-License-Identifier: Apache-2.0
"""The process above one local replica: starts and watches its server, and records how it exited.

loop.py             the shim itself: its loop, its cgroup, its status file; start here
server.py           the server: its events, and the actions that follow by `../replica_state.py`
server_process.py   the server's process: socket, cgroup, notify pipe, fork, kill, reap
server_exit.py      explains how the server exited, with the evidence
connections.py      the clients, and the protocol
files.py            sockets, lock and files
__main__.py         the lightweight entry point

client.py           for the daemon and its workers: start a shim, talk to it
forked.py           a shim that the daemon's zygote forks (Linux)
"""
