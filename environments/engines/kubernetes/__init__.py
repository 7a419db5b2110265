# SPDX-License-Identifier: Apache-2.0
"""Replicas as pods of Kubernetes."""
