# SPDX-License-Identifier: Apache-2.0
"""`python -m openenvd.environments.engines HOME ADDRESS`: the agent of an engine."""

import json
import sys
from pathlib import Path

from ..engine_address import EngineAddress
from .agent import main

if __name__ == "__main__":
    main(Path(sys.argv[1]), EngineAddress.from_json(json.loads(sys.argv[2])))
