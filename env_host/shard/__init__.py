# SPDX-License-Identifier: Apache-2.0
"""The processes that serve sessions: they take connections, and route each to where it belongs.

shard.py                the two kinds; base.py what they have in common
arrivals.py             connections whose first request is being read, and what it asks for
admission.py            which connection gets the next slot
connection_registry.py  tells the supervisor which sockets have sessions
"""
