# SPDX-License-Identifier: Apache-2.0
"""Replicas as jobs of Slurm."""
