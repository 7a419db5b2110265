# SPDX-License-Identifier: Apache-2.0
"""Engines run replicas: this machine below a shim, all others each behind an agent (`../agent/`).

local/       processes of this machine; the ports that they listen on
docker/ swarm/ slurm/ ray/ kubernetes/
             each an engine, in its `engine.py`; they know nothing of one another, except that
             swarm stands on docker

base.py      `EngineEntry`, the `Engine` protocol and its values: what one folder has to provide
registry.py  which engines are installed, which of a kind is meant, and whether each works here
providers.py what starts replicas, and writes down what each is; engine_provider.py: on an engine
started_replicas.py
             what is reported of a replica until it serves

host_options.py   what engines look at, change and refuse in what a replica is given, and what a
                  program is given on its node: Slurm's, Ray's
instance_logs.py  output with times, into a replica's log
"""
