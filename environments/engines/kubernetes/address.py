# SPDX-License-Identifier: Apache-2.0
"""Finds Kubernetes as `kubectl` finds it; without its library.

    KUBECONFIG ▶ ~/.kube/config, where there is one ▶ the cluster that this process runs in

The context that is current at a launch, and its namespace, stay those of its replicas:
`kubectl config use-context` and `set-context` change nothing about them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KUBECONFIG = "KUBECONFIG"
CONTEXT = "OPENENVD_KUBE_CONTEXT"
NAMESPACE = "OPENENVD_KUBE_NAMESPACE"
IN_CLUSTER = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")


def kubernetes_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead to the cluster that `kubectl` would use."""
    usual = Path(environ.get("HOME") or "~", ".kube", "config").expanduser()
    given = environ.get(KUBECONFIG, "")
    if not given and not usual.exists() and environ.get(IN_CLUSTER[0]):
        return {KUBECONFIG: "", **{name: environ.get(name, "") for name in IN_CLUSTER}}
    files = given or str(usual)
    context = environ.get(CONTEXT) or _current_context(files)
    namespace = environ.get(NAMESPACE) or _namespace(files, context)
    return {KUBECONFIG: files, CONTEXT: context, NAMESPACE: namespace}


def _current_context(files: str) -> str:
    """Return the current context of the first file that names one; empty: there is none."""
    return next((str(each["current-context"]) for each in _read(files, "current-context")), "")


def _namespace(files: str, context: str) -> str:
    """Return a context's namespace, of the first file that has it; empty: there is none."""
    for found in _read(files, "contexts"):
        for each in found["contexts"]:
            if isinstance(each, dict) and each.get("name") == context:
                namespace = (each.get("context") or {}).get("namespace")
                return str(namespace or "default")
    return ""


def _read(files: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield those of these files that can be read and have something of that name."""
    import yaml  # what a daemon that has no such cluster need not have

    for path in filter(None, files.split(os.pathsep)):
        try:
            found = yaml.safe_load(Path(path).read_bytes())
        except (OSError, yaml.YAMLError):
            continue
        if isinstance(found, dict) and found.get(key):
            yield found
