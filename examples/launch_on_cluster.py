# SPDX-License-Identifier: Apache-2.0
"""Four replicas on a cluster, one rollout over all of them, and nothing left behind.

python launch_on_cluster.py slurm episodes        each replica is a job; `sbatch` is found here
python launch_on_cluster.py ray episodes          each replica is an actor; RAY_ADDRESS says where
python launch_on_cluster.py local episodes        the same program on this machine alone

What a cluster needs beside it: `openenv check --provider slurm`, and docs/how-to/slurm.md.
"""

from __future__ import annotations

import sys

from openenvd import Client

REPLICAS = 4


def roll_out(provider: str, folder: str) -> int:
    """Return how many episodes were written to the folder."""
    client = Client()
    env = client.launch(
        "echo", name=f"echo-{provider}", provider=provider, replicas=REPLICAS
    ).wait()
    try:
        for replica in env.replicas:
            print(f"{replica['id']}: {replica['state']}")
        rollout = client.rollout(env, out=folder, episodes=64, concurrency=16, max_steps=4, seed=1)
        return int(rollout.wait()["there"])
    finally:
        env.down().wait()


if __name__ == "__main__":
    print(f"{roll_out(sys.argv[1], sys.argv[2])} episodes are in {sys.argv[2]}")
