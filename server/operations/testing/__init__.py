# SPDX-License-Identifier: Apache-2.0
"""Tests an environment on a real server, as its clients and its operators would find its faults.

    run.py          the agenda: check after check, against one running replica
    subject.py      what is tested: its address, processes and sessions, actions; findings
    protocol.py     what a client sends, and what has to come back
    blocking.py     steps that keep the event loop from everything else
    determinism.py  whether only the seed changes an episode, or also the process that serves it,
                    and whether copies of a session answer as it does
    leaks.py        what a session holds, and what stays of many: memory, descriptors, threads, …

A check plays as a client, and reads from outside what the server's processes hold. Decisions by
figures (a leak, a blocked loop) are functions of plain values.
"""
