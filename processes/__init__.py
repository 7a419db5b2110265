# SPDX-License-Identifier: Apache-2.0
"""The ground floor: what a process may use, how a tree of them is stopped, how one died.

Where to look:

    limits.py        CPU, memory and pids that this process may really use (cgroup v1, v2, affinity)
    cgroups.py       one memory cgroup per worker or replica, where the system allows one
    identity.py      a process by pid *and* start time, so that a reused pid is never signalled
    tree.py          stopping a whole process tree: terminate, grace, kill, collect
    exit_reason.py   `ExitReason`: how a process died, with the evidence
    keeper.py        the small parent of one replica, which outlives the daemon
    keeper_link.py   talking to a keeper from a worker, the daemon or a test

Imports nothing of the other rooms, except the frames of `env_host.protocol`.
"""
