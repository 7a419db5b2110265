# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a trainer, through a folder or a socket.

senders.py     the collector's side
receivers.py   the trainer's side
frames.py      the form in which batches travel
streams.py     frames on asyncio's streams
"""
