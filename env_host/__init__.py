# SPDX-License-Identifier: Apache-2.0
"""Serves one environment's sessions: runs inside the environment's own Python, and stands alone.

Where to look, a process at a time:

    main.py, __main__.py    the life of a host: configuration, import, who serves
      protocol.py           its doors: what it is told, what it tells (notify.py writes it)
      definition.py, project.py, gradio_guard.py, interfaces.py, calls.py
                            what is served, and how it wants to be called
      limits.py, fds.py     how many sessions, in how many processes
      errors.py             what goes wrong, as a tree
      preload.py            what a process that forks hosts imports before

    zygote.py               the host: one `select`, which forks those who serve and outlives them
      starting.py           makes children; programs.py those that cannot be forked
      children.py           who lives; signals.py what it hears of them from the kernel
      held_sockets.py       copies of their connections, for when one dies
      deaths.py             how one died; last_words.py its clients are told
      unanswered.py         what becomes of connections that the dead had not answered
      succession.py         when a shard's successor is due
      isolating.py          the processes of single sessions
      session_cgroup.py, memory_watch.py, session_memory.py
                            their caps, and what they hold
      host_news.py          how full it is, for the shim

    between the processes
      board.py              what each says of itself, in shared memory
      capacity.py, metrics.py
                            what that means for who asks
      handover.py           messages with descriptors
      child.py, gpus.py, heap.py
                            what a process does first

    shard.py, isolated_session.py
                            the processes that serve
      process.py            what they have in common; orders.py what they were told
      acceptor.py, heads.py the shared socket, and where a connection belongs
      admission.py          who gets the next slot
      guard.py              what the host is told of its connections
      sessions.py, session.py, session_call.py, session_thread.py, creation.py
                            sessions, from slot to close
      session_watch.py, idle.py
                            those that hang, leave, or are not used
      lag.py                how late the loop is

    what a client sees
      serve.py, front_door.py
                            uvicorn for HTTP, ours for `/ws`
      session_socket.py     `/ws`: ws_handshake.py, ws_frames.py, ws_protocol.py below it,
                            frames.py, written.py above it
      asgi.py, asgi_socket.py, http_routes.py, affinity.py
                            HTTP, also for sessions of other shards
      mcp.py, mcp_socket.py, mcp_types.py
                            MCP

    shared_state.py         a state that all sessions share, and the process that holds it; its
                            docstring names the other shared_state_*.py

This file imports nothing: `protocol` and `lag` are read by other rooms.
"""
