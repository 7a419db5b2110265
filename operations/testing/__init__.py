# SPDX-License-Identifier: Apache-2.0
"""Tests an environment on a real server, as its clients and its operators would find its faults.

    run.py          the agenda: check after check, against one running replica
    subject.py      what is tested: its address, its actions, its sessions, its server's processes
    session.py      one session, of whose frames nothing is hidden
    actions.py      which actions are played: given ones, the schema's examples, or random ones
    protocol.py     what a client sends, and what has to come back
    memory.py       how much memory a session holds
    blocking.py     steps that keep the event loop from everything else
    determinism.py  whether a seed makes an episode repeatable
    processes.py    what is different where several processes serve sessions
    leaks.py        what stays of many sessions: memory, descriptors, threads, tasks, processes
    report.py       findings, and the outcome of a check

A check plays as a client, and reads from outside what the server's processes hold. What it decides
by figures (a leak, a blocked loop) stands in functions of plain values.
"""
