# SPDX-License-Identifier: Apache-2.0
"""The ground floor: what a process may use, how a tree of them is stopped, how one died.

Where to look:

    limits.py          CPU, memory and pids that this process may really use
    cgroup_tree.py     where this process stands in the control groups; reading their files
    cgroups.py         one memory cgroup per worker or replica, where the system allows one
    process_room.py    how many more processes there may be, and what to say when none
    memory.py          what a process, or a tree of them, holds now
    identity.py        a process by pid *and* start time, so that a reused pid is never signalled
    tree.py            stopping a whole process tree: terminate, grace, kill, wait
    priority.py        whom the scheduler prefers when many sessions compete
    exit_reason.py     `ExitReason`: how a process died, with the evidence
    diagnose.py        from a wait status and counters to an `ExitReason`
    oom_evidence.py    what the kernel counts and writes when it kills for memory
    signal_pipe.py     signals as something that shim and fork server select on
    after_fork.py   making a forked child as good as an exec'ed one
    detached.py        starting a program that outlives us
    tail.py            the last lines of a log

Imports nothing of the other rooms, except the frames of `env_host.protocol`.
"""
