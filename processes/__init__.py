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
    explain.py         from a wait status and counters to an `ExitReason`
    oom_evidence.py    what the kernel counts and writes when it kills for memory
    keeper_link.py     starting a keeper, and talking to it, from a worker, the daemon or a test
    keeper.py          the small parent of one replica, which outlives the daemon: its agenda
    keeper_wire.py     what clients and keeper say to each other
    keeper_clients.py  its clients, none of whom can block it
    keeper_files.py    what it is handed, opens and writes
    keeper_group.py    the cgroup that keepers live in
    server_life.py     what happens to its server, from one state to the next
    keeper_status.py   what is known and told of the server
    keeper_ending.py   when server and keeper are to be ended
    kept_server.py     the server's process: its socket, cgroup, start and end
    server_child.py    how it is forked
    notify_pipe.py     what it says to the keeper
    server_exit.py     how it ended, or why it could not be started
    shard_exits.py     how a process of its own ended, while it goes on
    log_bound.py       how its log is kept bounded
    run_keeper.py      the light way into it
    nursery.py         what forks keepers, and with them servers, from modules imported once
    nursery_link.py    asking it for one, starting and ending it
    signal_pipe.py     signals as something that keeper and nursery select on
    fresh_process.py   making a forked child as good as an exec'ed one
    detached.py        starting a program that outlives us
    tail.py            the last lines of a log

Imports nothing of the other rooms, except the frames of `env_host.protocol`.
"""
