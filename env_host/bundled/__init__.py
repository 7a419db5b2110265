# SPDX-License-Identifier: Apache-2.0
"""The bundled environments: `openenv launch NAME` finds each folder with an `openenv.yaml`."""
