# SPDX-License-Identifier: Apache-2.0
"""Replicas as processes of this machine, each below a shim."""
