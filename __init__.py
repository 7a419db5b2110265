# SPDX-License-Identifier: Apache-2.0
"""openenvd: run OpenEnv environments on a laptop, thousands of sessions at a time.

The rooms, in the order in which a request meets them:

    cli → client → server → requests_db → server.dispatcher → executor → operations → environments
                                                                                 → env_host

This file stays empty of imports: `openenv status` must start in a blink, and the env host
imports this package inside other projects' Pythons.
"""

__version__ = "0.1.0"
