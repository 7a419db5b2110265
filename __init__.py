# SPDX-License-Identifier: Apache-2.0
"""openenvd: run OpenEnv environments on a laptop, thousands of sessions at a time.

The rooms, in the order in which a request meets them:

    cli → client → server.api → requests_db → server.dispatch → executor → server.operations
        → environments → env_host

This file imports nothing: `openenv status` must start in a blink, and the env host
imports this package inside other projects' Pythons.
"""

__version__ = "0.2.0"

_ERRORS = ("ApiRefused", "ClientError", "DaemonUnreachable", "RequestFailed", "SessionError")
_INTERFACES = ("Action", "Environment", "EnvironmentMetadata", "Observation", "State")
_PUBLIC = {  # their types: `__init__.pyi`
    **dict.fromkeys(("AsyncClient", "Client"), ".client"),
    **dict.fromkeys(_ERRORS, ".client.errors"),
    **dict.fromkeys(_INTERFACES, ".env_host.environment.interfaces"),  # of your own environments
}


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
