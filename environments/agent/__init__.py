# SPDX-License-Identifier: Apache-2.0
"""The agent of an engine: one process for each engine and home, which outlives the daemon.

    daemon, launches ──▶ agent ──▶ engine (`../engines/`) ──▶ instances

To the rest an agent is the shim of all its replicas: run files, control sockets, status files and
logs are the same. `../agent_client.py` starts an agent, and asks it.

agent.py          which replicas it serves, its own socket, its life; start here
replica.py        one replica: what its state (`../replica_state.py`) makes due
instance.py       its instance on the engine, and the server in it, asked over HTTP
replica_status.py what is known of it; its status file and control socket: a shim's protocol
engine_watch.py   looks at everything when the engine says that something has changed;
                  from what it knows of an exit to an `ExitReason`
"""
