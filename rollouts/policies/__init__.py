# SPDX-License-Identifier: Apache-2.0
"""Policies, by name or as objects; `policy.py` draws which there are."""
