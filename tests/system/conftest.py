# SPDX-License-Identifier: Apache-2.0
"""Real cgroups, and the check that a test leaves no process behind, as for the shim."""

from ..environments.shim.conftest import cgroups as cgroups
from ..environments.shim.conftest import no_process_survives as no_process_survives
