# SPDX-License-Identifier: Apache-2.0
"""Processes: identity, forking, signals, trees, how one ended, how late a loop is."""
