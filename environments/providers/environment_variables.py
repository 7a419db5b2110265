# SPDX-License-Identifier: Apache-2.0
"""The environment variables of a replica: a small inherited base, ours, and the user's.

The rest is not inherited: the daemon may have been started from any shell, whose tokens are
private, and whose `PYTHONPATH` or `VIRTUAL_ENV` would lead a project astray.
"""

from __future__ import annotations

from collections.abc import Mapping

# Where things are, how to reach the network, which accelerators there are.
INHERITED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ"}
    | {"TMPDIR", "TMP", "TEMP", "DISPLAY", "HF_HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}
    | {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
)
INHERITED_PREFIXES = ("LC_", "XDG_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_")

MAX_SESSIONS_VARIABLE = "MAX_CONCURRENT_ENVS"  # upstream projects read it by convention
HOME_VARIABLE = "OPENENV_HOME"
RUN_DIR_VARIABLE = "OPENENVD_RUN_DIR"  # of a replica, for all that it starts: whose they are


def child_environment(
    inherited: Mapping[str, str],
    *,
    home: str,
    max_sessions: int | None,
    given: Mapping[str, str],
) -> dict[str, str]:
    """The full environment of one replica; what the user gave wins over everything."""
    base = {
        name: value
        for name, value in inherited.items()
        if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    ours = {
        HOME_VARIABLE: home,  # tells whose process it is
        "PYTHONDONTWRITEBYTECODE": "1",  # a project's folder stays as it is
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a traceback in the log
    }
    if max_sessions is not None:
        ours[MAX_SESSIONS_VARIABLE] = str(max_sessions)
    return {**base, **ours, **given}
