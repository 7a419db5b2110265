# SPDX-License-Identifier: Apache-2.0
"""Serves one environment's sessions: runs inside the environment's own Python.

    main.py, __main__.py  the life of the process: configuration, import, which process serves
    errors.py             what can go wrong, as a tree

    supervisor/           the parent: forks the processes that serve, reports and replaces them
    shard/                a process that serves: accepting, admission, routing, isolated sessions
    serving/              how a connection is answered: uvicorn for HTTP, `/ws` and MCP of our own
    sessions/             a session from its slot to its close: threads, time-outs
    shared_state/         a state that all sessions share, and the process that holds it
    environment/          what is served: project or class, its instances, how many sessions
    websocket/            handshake, frames and protocol of a WebSocket
    ipc/                  between processes: scoreboard, descriptors, child configuration, notify
    startup.py            what a process does first: limits, GPUs, byte code, event loop
    preload.py            what the zygote imports
    bundled/              the environments echo, benchmark and brigade

The interface to the shim (variables, configuration, notify pipe) is `schema/protocol.py`. This file
imports nothing.
"""
