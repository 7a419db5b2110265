# SPDX-License-Identifier: Apache-2.0
"""The gateway: Envoy, which gives environments one address each, whatever runs their replicas.

    client ══ ws://127.0.0.1:PORT/envs/NAME/ws ══▶ Envoy ══▶ replica 0
                                                     │ ╚═════▶ replica 1
                                       reads again   │
    daemon (server/reconcile/gateway.py) ──rename──▶ config/*.json

    configuration.py    Envoy's configuration: pure functions
    lua.py              the program that Envoy runs for each request and answer
    envoy.py            writes Envoy's files, replacing them by rename; reads its admin interface
    process.py          starts Envoy, once a home, below a shim; stops it
    start_envoy.py      the program between the shim and Envoy: it reports when Envoy is ready

A launch with `--gateway` starts the gateway, if it does not run, and waits until Envoy has the
launch's replicas. The daemon writes the routes and endpoints of all environments, restarts an Envoy
that exited, and stops it when no environment wants it any more.

Failure cases:

* The daemon exits: Envoy and its shim continue, with the endpoints that were last written.
* Envoy exits: its sessions end with their connections. The daemon makes the shim start it again, on
  the port that the shim has kept reserved, with the files that are there.
* The shim exits: the kernel ends Envoy; the daemon starts a new shim.
* No replica takes sessions: requests are held by the daemon until one does
  (`server/reconcile/held_requests.py`); without a daemon, they are answered 503.
* The gateway's run file is damaged, or another version's: the gateway continues unwatched, and the
  environments behind it are DEGRADED and say why. No launch can use it; it is stopped when nothing
  wants it.
* A replica exits: its sessions end, and Envoy tells their clients; handshakes are tried on another
  replica, until the daemon's next endpoints leave it out.
* A file cannot be written (a full disk): Envoy keeps its configuration; the daemon tries again.
* Envoy cannot read a file: it keeps its configuration, and its log says so.
* Two launches start it at once: the second waits for a lock, and finds the gateway of the first.
* The last environment ends while a launch begins: the daemon checks again, with the lock held,
  whether any environment wants the gateway; a launch has its row before it takes the lock.
* An update moves an environment behind the gateway, or away from it: the gateway runs while a
  generation behind it starts, and until the sessions of such a generation have ended.

This file imports nothing.
"""
