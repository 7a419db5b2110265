# SPDX-License-Identifier: Apache-2.0
"""The environment that is served: found, imported, inspected, and created once a session."""
