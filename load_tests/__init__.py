# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs that print a table and write JSON. Nothing imports them.

    python -m load_tests.cold_cli        a cold `openenv status` against `import click`
    python -m load_tests.before_after    two trees by turns: figures that a large change must keep
    python -m load_tests.idle_cost       the cost of idle processes: CPU, wake-ups, PSS
    python -m load_tests.launch          request to ready, a dead shard's return, waking
    python -m load_tests.queue_dispatcher  the dispatch rate, beside the seed's five arrangements
    python -m load_tests.low_resources   launches and memory in cgroups of 0.5 CPU/750 MB, 4/16 GB
    python -m load_tests.short_requests  a SHORT request through everything; 50 clients at once
    python -m load_tests.scaling         sessions at once, their latencies; the peer, the limit
    python -m load_tests.held_sessions   65,536 open sessions: memory, and steps of some of them
    python -m load_tests.failures.changing_replicas  updates and autoscaling under sessions
    python -m load_tests.failures.worlds  random kills: are answers and causes of death right?
    python -m load_tests.failures.rollout_crashes  random kills: is each episode there once?
    python -m load_tests.steps           steps a second by sessions and size; the peer, the limit
    python -m load_tests.run_short       the short form of all of them
    python -m load_tests.brigade         singers of one state at once, in one process and in shards
    python -m load_tests.rollouts        episodes and bytes a second, beside three naive ways

`shared/` has what several programs use: reports, clients, operations for workers. `envs_for_load/`
has environments to launch. `peers/` has what the programs compare with.

Each program takes `--repetitions N` and `--json FILE`, and prints the machine and the spread.
Machines differ and are noisy: quote ratios and medians.
"""
