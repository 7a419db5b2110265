# SPDX-License-Identifier: Apache-2.0
"""A state that all sessions of a replica share, and the process that holds it."""
