# SPDX-License-Identifier: Apache-2.0
"""Runs above one local replica: starts and watches its server, and records its end."""
