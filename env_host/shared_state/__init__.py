# SPDX-License-Identifier: Apache-2.0
"""Shared worlds: the sessions of all shards act on one state, which one process holds.

A class that declares `SHARED_STATE = True` has a `create_state()` (see `process.py` for
what its methods may be). The supervisor forks the *state process* before the shards; the
environment of each session, in its shard, calls the state as `await self.world.method(...)`.

    supervisor ──fork──▶ state process ◀── Unix stream sockets ──▶ shard 0..n-1
      │            one StateServer                           one StateLink each
      └ holds the listening socket: it outlives every state process

    session: world.mix ──(room?)──▶ CALL ───────────────────────▶ state.mix(...)
             result    ◀── by request id ◀──── REPLY / FAILURE ◀── result / exception

What fails, and how it shows:

    shard killed mid-call        EOF in the state process: the call finishes, its reply is
                                 dropped, `session_ended` for each of its sessions. Its successor
                                 has a connection of its own and can receive nothing of this.
    state process exits          EOF in every shard: all calls in flight fail at once with
                                 `WorldLost`, all sessions end with it; the supervisor forks the
                                 next epoch, shards connect again (their connects wait in the
                                 listening socket's queue), new sessions live in the new state.
    state process stalls         deadlines: `WorldTimeout`; then nothing more is sent, `WorldBusy`.
    a call takes too long        `WorldTimeout`; its late reply is dropped, by its id.
    a method raises              `WorldCallFailed`, this call only.
    a reply or a call of another that connection is closed: to the shard as if the state process
      epoch, or to no call; or    had died, to the state process as if the shard had.
      garbage
    the supervisor exits         the state process notices within a second and exits.

    frames.py      frames, encoded and decoded; what can go wrong
    process.py     the state process, and the connections in it
    connection.py  a shard's link to it, and `self.world`
"""
