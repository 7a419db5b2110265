# SPDX-License-Identifier: Apache-2.0
"""Environments: what can be launched, how it is prepared, and how its replicas are started.

    sources/       from what a user wrote to a program that runs
    preparation/   virtual environments of projects, and container images
    engines/       what runs replicas: this machine, Docker, Swarm, Slurm, Ray, Kubernetes
    agent/         the process above the replicas of an engine, which outlives the daemon
    gateway/       one address for all environments: Envoy, and its configuration
    run_files.py   one file for each replica; stops and restarts replicas
    strays.py      replicas without a record: they are shown, and stopped when asked
    agent_client.py
                   starts the agent of an engine, and sends it questions
    access.py      sends an environment a request over HTTP
    replica_policy.py
                   how many replicas, their shares of sessions, when one is started again
    replica_state.py
                   the states and the status of a replica, for shims and agents
    shim/          the process above a local replica, which outlives the daemon

Specifications, names, folders and errors are in `schema/`. This file imports nothing.
"""
