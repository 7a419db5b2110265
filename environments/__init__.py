# SPDX-License-Identifier: Apache-2.0
"""Environments: what can be launched, how it is prepared, and how its replicas are started.

    sources/       from what a user wrote to a program that runs
    preparation/   virtual environments of projects, and container images
    engines/       what runs replicas: this machine, Docker, Swarm, Slurm, Ray, Kubernetes
    agent/         the process above the replicas of an engine, which outlives the daemon
    gateway/       one address for all environments: Envoy, and its configuration
    image_names.py which names images can have, and those that are built here
    run_files.py   one file for each replica; stops and restarts replicas
    strays.py      what runs and nobody has written down: shown, and stopped when asked
    agent_client.py
                   starts the agent of an engine, and asks it
    http_get.py    asks an environment over HTTP
    following.py   one launch of an environment, through its restarts
    restart_policy.py
                   when a replica that exited is started again
    command_output.py
                   runs a command, and passes its output on
    gpus.py        the GPUs of this machine
    shim/          the process above a local replica, which outlives the daemon

What was asked for, names, folders and errors are in `schema/`. This file imports nothing.
"""
