# SPDX-License-Identifier: Apache-2.0
"""The sessions of one process.

table.py    slots, and how a session begins and ends      session.py   one environment instance
threads.py  where synchronous calls run                   branches.py  branches and checkpoints
copying.py  which copies of an instance are safe          fork_checks.py  what forbids a fork
remote_session.py  a session in a process of its own
"""
