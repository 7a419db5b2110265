# SPDX-License-Identifier: Apache-2.0
"""The agent of an engine: one process for each engine and home, which outlives the daemon.

    daemon, launches ──▶ agent ──▶ engine (`../engines/`) ──▶ instances

To its clients an agent is the shim of all its replicas: run files, control sockets, status files
and logs are the same. `../agent_client.py` starts an agent, and sends it questions.

agent.py          the agent: its replicas, its own socket, its start and end; start here
replica.py        one replica: the actions that follow from its state (`../replica_state.py`)
instance.py       the replica's instance on the engine, and HTTP requests to the server in it
replica_status.py the replica's status, its status file and its control socket: a shim's protocol
engine_watch.py   lists the engine's instances when the engine reports a change; makes an
                  `ExitReason` of what the engine knows of an exit
"""
