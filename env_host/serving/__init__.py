# SPDX-License-Identifier: Apache-2.0
"""Answers connections: `/ws`, HTTP and MCP.

uvicorn_server.py  uvicorn, and the switch to `/ws`    ws_session.py     a session on `/ws`
app.py             which HTTP request goes where, and OpenEnv's HTTP routes
mcp.py             tools over JSON-RPC                 access.py         who may use an environment
messages.py        `/ws` messages from and to text     event_driven.py   uvicorn without its ticks
own_app.py         a project's routes and middleware
"""
