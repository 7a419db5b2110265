# SPDX-License-Identifier: Apache-2.0
"""Processes episodes between collecting and training, in sinks and functions of the user's."""
