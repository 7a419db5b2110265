# SPDX-License-Identifier: Apache-2.0
"""The gateway: Envoy, which gives environments one address each, whatever runs their replicas.

    client ══ ws://127.0.0.1:PORT/envs/NAME/ws ══▶ Envoy ══▶ replica 0
                                                     │ ╚═════▶ replica 1
                                       reads again   │
    daemon (server/reconcile/gateway.py) ──rename──▶ config/*.json

    configuration.py    Envoy's configuration: pure functions
    lua.py              what Envoy does with each request and answer beside that
    envoy.py            the files that it reads, replaced by rename; asks it how its clusters are
    process.py          its process: started once a home, below a shim; stopped
    start_envoy.py      the program between the shim and Envoy: reports that it is ready

A launch with `--gateway` starts the gateway, if it does not run, and waits until Envoy has its
replicas; the daemon writes the routes and endpoints of all environments, restarts an Envoy that
exited, and stops it when no environment wants it any more.

Failure cases:

* The daemon exits: Envoy and its shim go on, with the endpoints that were written last.
* Envoy exits: its sessions end with their connections. The daemon has the shim start it again, on
  the port that the shim has kept reserved, with the files that are there.
* The shim exits: the kernel ends Envoy; the daemon starts a new shim.
* No replica takes sessions: requests are held by the daemon until one does
  (`server/reconcile/held_requests.py`); without a daemon, they are answered 503.
* Its run file is damaged, or another version's: it continues unwatched, and the environments behind
  it are DEGRADED and say why. No launch gets behind it; it is stopped when nothing wants it.
* A replica exits: its sessions end, and Envoy tells their clients; handshakes are tried on another
  replica, until the daemon's next endpoints leave it out.
* A file cannot be written (a full disk): Envoy keeps what it has; tried again until it can.
* A file is not what Envoy can read: it keeps what it has, and says so in its log.
* Two launches at once: a lock; the second finds the gateway of the first.
* The last environment goes while a launch begins: whether anybody wants the gateway is read again
  with the lock held, and a launch has its row in the table before it asks for the gateway.
* An update takes an environment behind the gateway, or away from it: the gateway runs while a
  generation that is behind it starts, and until the sessions of one that was have ended.

This file imports nothing.
"""
