# SPDX-License-Identifier: Apache-2.0
"""Engines run replicas: this machine below a shim, all others each behind an agent (`../agent/`).

local/       processes of this machine; the ports that they listen on
docker/ swarm/ slurm/ ray/ kubernetes/
             each an engine, in its `engine.py`; they know nothing of one another, except that
             swarm stands on docker

base.py      `EngineEntry`, the `Engine` protocol and its values: what one folder has to provide
registry.py  which engines are installed, and which of a kind is meant
check.py     whether each works here: `openenv check` asks it in a process of its own
providers.py what starts replicas, by name; engine_provider.py: an engine as a provider
new_replicas.py, started_replicas.py
             what is written down of a replica before it starts, and reported of it until it serves

host_options.py   what engines look at, change and refuse in what a replica is given, and what a
                  program is given on its node: Slurm's, Ray's
server_answers.py what a replica's server says over HTTP
instance_logs.py  output with times, into a replica's log
"""
