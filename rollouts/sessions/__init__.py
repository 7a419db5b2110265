# SPDX-License-Identifier: Apache-2.0
"""Sessions at OpenEnv servers: hundreds of them on one event loop.

session_pool.py    open sessions, and who waits for one
session.py         one session: reset and steps, one question at a time
inbox.py           received bytes: whole messages, and frames for the library
message_memory.py  memory for large messages, whose pages are reused
answers.py         a server's answers, split without being parsed
"""
