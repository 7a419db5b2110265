# SPDX-License-Identifier: Apache-2.0
"""Makes worker processes: by the zygote, or as a subprocess where fork is not safe."""
