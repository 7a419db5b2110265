# SPDX-License-Identifier: Apache-2.0
"""Engines that run replicas elsewhere than below a shim, each behind a process of ours: its agent.

    daemon, launches ──▶ agent (a process for each engine and home) ──▶ engine ──▶ instances

To the rest an agent is the shim of all its replicas: run files, control sockets, status files and
logs are the same. `../agent_client.py` starts an agent, and asks it.

agent.py          the agent: which replicas it serves, its own socket, its life; start here
replica.py        one replica's state machine; replica_status.py: what is known of it
engine_watch.py   looks at everything when the engine says that something has changed
log_pump.py       an instance's output, into its replica's log
status_server.py  a replica's control socket: a shim's protocol
server_answers.py what a replica's server says over HTTP

base.py      the `Engine` protocol and its values: what one file an engine has to provide
registry.py  which engines there are, what installs their libraries, and which of a kind is meant
check.py     whether each works here: `openenv check` asks it in a process of its own
exits.py     from what an engine knows of an exit to an `ExitReason`
docker.py, swarm.py, slurm.py, ray.py, kubernetes.py: the engines, with NAME_*.py beside them

host_options.py  what engines look at, change and refuse in what a replica is given
node_program.py  what a program is given on its node: Slurm's, Ray's
timed_output.py  output with times, and where to go on in it
"""
