# SPDX-License-Identifier: Apache-2.0
"""Replicas as actors of a Ray cluster."""
