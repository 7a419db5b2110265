# SPDX-License-Identifier: Apache-2.0
"""The commands of `openenv`: a module for each, or for those that share their options."""
