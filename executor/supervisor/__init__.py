# SPDX-License-Identifier: Apache-2.0
"""What the executor's thread does: starts workers, assigns tasks to them, records how each ended.

lifecycle.py       a worker from its start by the source in use to its reaping: stop, leave, kill
tasks.py           assigns tasks to workers, and makes events of their frames and exits
memory.py          sets each worker's memory cap: its cgroup, or the watchdog; evidence of kills;
                   ends whole process trees, and those of killed daemons
pool.py            bookkeeping: who is idle, who runs what, what waits
channels.py        pipes, sentinels and the wake-up that the thread waits for
"""
