# SPDX-License-Identifier: Apache-2.0
"""The prefork supervisor: imports the environment once and forks the processes that serve it."""
