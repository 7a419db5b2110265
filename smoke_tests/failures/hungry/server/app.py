# SPDX-License-Identifier: Apache-2.0
"""This module is never imported: the launch fails before."""

app = None
