# SPDX-License-Identifier: Apache-2.0
"""The sessions of one process.

table.py    slots, and how a session begins and ends      session.py   one environment instance
threads.py  where synchronous calls run                   branches.py  branches and checkpoints
copying.py  which copies of an instance are safe          session_process.py  forked sessions
fork_checks.py  what forbids to fork a session's process
"""
