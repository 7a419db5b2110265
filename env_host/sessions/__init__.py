# SPDX-License-Identifier: Apache-2.0
"""Sessions of one shard, from slot to close."""
