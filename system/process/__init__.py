# SPDX-License-Identifier: Apache-2.0
"""Processes: identity, forking, signals, trees, exit reasons, event loop lag."""
