# SPDX-License-Identifier: Apache-2.0
"""Real processes and cgroups, and the check that a test leaves none behind, as for the shim."""

from __future__ import annotations

from ..environments.shim.conftest import cgroups as cgroups
from ..environments.shim.conftest import no_process_survives as no_process_survives
from ..environments.shim.conftest import replica as replica
