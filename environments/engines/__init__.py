# SPDX-License-Identifier: Apache-2.0
"""Engines run replicas: on this machine each below a shim, elsewhere behind an agent (`../agent/`).

local/       processes of this machine, and the ports that they listen on
docker/ swarm/ slurm/ ray/ kubernetes/
             one engine each, in `engine.py`; only swarm knows another one, docker

base.py      the interface of an engine: `EngineEntry`, the `Engine` protocol and its values
registry.py  finds the installed engines, their addresses, and whether each works here
providers.py starts replicas, on an engine or here, and writes their run files
started_replicas.py  reports about a replica until it serves
host_options.py      reads, changes and checks the options of replicas; prepares programs on nodes
instance_logs.py     copies the output of instances into the logs of replicas
"""
