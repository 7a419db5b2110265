# SPDX-License-Identifier: Apache-2.0
"""Brings environments from what is observed to what is wanted."""
