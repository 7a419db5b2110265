# SPDX-License-Identifier: Apache-2.0
"""Replicas as services of a Docker swarm."""
