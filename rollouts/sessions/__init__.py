# SPDX-License-Identifier: Apache-2.0
"""Sessions at an OpenEnv server, hundreds of them on one loop, none of which may hold it.

session.py         one session: reset and steps, one question at a time
session_pool.py    those that are open, and whose turn it is
wire.py            one WebSocket below a session
inbox.py           where what comes goes: messages to whoever waits, all else to the library
outgoing.py        what is sent
intake.py          so many bytes in a turn of the loop
message_memory.py  memory for large messages, whose pages are used again
answers.py         what a server answers, taken apart without being parsed
descriptors.py     room for many sockets, made before the first
secure.py          certificates, read once
"""
