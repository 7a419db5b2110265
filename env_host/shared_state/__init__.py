# SPDX-License-Identifier: Apache-2.0
"""Shared worlds: the sessions of all shards act on one state, which one process holds.

A class that declares `SHARED_STATE = True` has a `create_state()` (see `shared_state_methods.py`
for what its methods may be). The host forks the *state process* before the shards; the environment
of each session, in its shard, calls the state as `await self.world.method(...)`.

    host ──fork──▶ state process ◀── Unix stream sockets ──▶ shard 0..n-1
      │            one StateServer                           one StateLink each
      └ holds the listening socket: it outlives every state process

    session: world.mix ──▶ Pending ──(room?)──▶ CALL ───────────▶ state.mix(...)
             result    ◀── by request id ◀──── REPLY / FAILURE ◀── result / exception

What fails, and how it shows:

    shard killed mid-call        EOF in the state process: the call finishes, its reply goes
                                 nowhere, `session_ended` for each of its sessions. Its successor
                                 has a connection of its own and can receive nothing of this.
    state process dies           EOF in every shard: all that is in flight fails at once with
                                 `WorldLost`, all sessions are ended with it; the host forks the
                                 next epoch, shards connect again (their connects wait in the
                                 listening socket's queue), new sessions live in the new state.
    state process stalls         deadlines: `WorldTimeout`; then nothing more is sent, `WorldBusy`.
    a call takes too long        `WorldTimeout`; its late reply is dropped, by its id.
    a method raises              `WorldCallFailed`, this call only.
    a reply or a call of another that connection is closed: to the shard as if the state process
      epoch, or to nobody; or    had died, to the state process as if the shard had.
      garbage
    the host dies                the state process notices within a second and ends.

    shared_state_wire.py     frames                    shared_state_methods.py  what may be called
    shared_state_server.py   in the state process      shared_state_limits.py   bounds, deadlines
    shared_state_link.py     in a shard                shared_state_process.py  fork, exit, again
    shared_state_connection.py  calls in flight        shared_state_outgoing.py one write a turn
"""
