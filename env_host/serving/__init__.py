# SPDX-License-Identifier: Apache-2.0
"""What a client sees: `/ws`, HTTP and MCP."""
