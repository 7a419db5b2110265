# SPDX-License-Identifier: Apache-2.0
"""The HTTP API: routes, security, schemas, streams."""
