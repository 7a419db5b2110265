# SPDX-License-Identifier: Apache-2.0
"""Where worker processes come from: the zygote, or a subprocess where fork is not safe."""
