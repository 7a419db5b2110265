# SPDX-License-Identifier: Apache-2.0
"""Examples of every command: on its help page, and on the site's page of commands.

Each is a command line, and what it does. Tests hold that every command has some, and that each of
them is one.
"""

from __future__ import annotations

Example = tuple[str, str]

EXAMPLES: dict[str, tuple[Example, ...]] = {
    "openenv": (
        ("openenv launch echo", "start the daemon, and an environment"),
        ("openenv status", "show what runs"),
        ("openenv rollout echo --out episodes", "play episodes in it"),
        ("openenv down echo", "take it down"),
    ),
    "openenv up": (
        ("openenv up", "start the daemon, if it does not run"),
        ("openenv up --port 9000 --max-long-workers 4", "with settings of its own"),
        ("openenv up --foreground", "for systemd and other service managers"),
    ),
    "openenv launch": (
        ("openenv launch echo", "a bundled environment"),
        ("openenv launch ./my_env --memory 2G", "a project's folder, with a memory limit"),
        ("openenv launch my_module:MyEnvironment -e API_KEY", "a class; $API_KEY is handed on"),
        ("openenv launch ./my_env --replicas 4 --gateway", "four replicas at one address"),
        ("openenv launch ./my_env --provider docker", "in a container"),
        ("openenv launch --async ./my_env", "print the request's id, and return"),
    ),
    "openenv rollout": (
        ("openenv rollout echo --out episodes --episodes 64", "random actions"),
        ("openenv rollout my_env --out out --policy my_policies:act", "a function of yours"),
        ("openenv rollout my_env --out out --launch --group 8", "launch it first; groups for GRPO"),
    ),
    "openenv status": (
        ("openenv status", "environments and requests"),
        ("openenv status my_env", "one environment, with its replicas and generations"),
        ("openenv status --watch", "redrawn when something changes"),
        ("openenv status --json", "for programs"),
    ),
    "openenv dashboard": (("openenv dashboard", "sign a browser in, and open the page"),),
    "openenv address": (("openenv address my_env", "what `EnvClient(base_url=…)` takes"),),
    "openenv gateway": (("openenv gateway status", "its address and replicas"),),
    "openenv gateway status": (("openenv gateway status", "sessions and health of each replica"),),
    "openenv logs": (
        ("openenv logs -f my_env", "follow its youngest replica"),
        ("openenv logs --tail 100 7f3a91c2", "the end of a request's log"),
    ),
    "openenv requests": (
        ("openenv requests --state failed", "what failed"),
        ("openenv requests --environment my_env --limit 5", "the last ones of an environment"),
    ),
    "openenv wait": (("openenv wait 7f3a91c2", "its outcome is the exit code"),),
    "openenv retry": (
        ("openenv retry 7f3a91c2", "the same again"),
        ("openenv retry 7f3a91c2 --memory 2G", "with more memory, and all else as it was"),
    ),
    "openenv cancel": (
        ("openenv cancel 7f3a91c2", "one request"),
        ("openenv cancel 7f3a91c2 9b1d0c44", "several"),
    ),
    "openenv bench": (
        ("openenv bench benchmark", "32, 128 and 512 sessions at once, three times"),
        (
            'openenv bench my_env --requests-grid 64,1024 --action \'{"message": "hi"}\'',
            "other batches, an action of its own",
        ),
        (
            "openenv bench benchmark --wait-grid 1,5,10",
            "with steps that wait one, five and ten seconds",
        ),
    ),
    "openenv test": (
        ("openenv test ./my_env", "protocol, leaks, blocking steps, seeds"),
        ('openenv test ./my_env --action \'{"code": "1 + 1"}\'', "with an action of its own"),
        ("openenv test ./my_env --sessions 10000 --skip determinism", "look longer for leaks"),
    ),
    "openenv image": (("openenv image build ./my_env", "an image for engines"),),
    "openenv image build": (
        ("openenv image build ./my_env --tag registry.example.org/my_env:1", "to be pushed"),
        ("openenv image build ./my_env --base python:3.12", "on another image"),
    ),
    "openenv scale": (
        ("openenv scale my_env 4", "four replicas, at the same address"),
        ("openenv scale my_env 1 --drain-timeout 5m", "one; the others end with their sessions"),
    ),
    "openenv restart": (
        ("openenv restart my_env", "one replica after another, no session ends"),
        ("openenv restart my_env --replica 2", "one alone"),
    ),
    "openenv down": (
        ("openenv down my_env", "stop its replicas"),
        ("openenv down --all", "of all environments"),
    ),
    "openenv prune": (("openenv prune", "free the disk space of unused dependencies"),),
    "openenv stop": (("openenv stop", "environments continue"),),
    "openenv check": (
        ("openenv check", "what keeps this machine from its best"),
        ("openenv check --provider slurm --engine-option partition=cpu", "try a provider"),
    ),
    "openenv info": (("openenv info", "limits, plan and workers"),),
    "openenv config": (("openenv config", "each setting, and where it comes from"),),
    "openenv completion": (
        ("openenv completion bash", "print the script for ~/.bashrc"),
        ("openenv completion fish", "print the script for config.fish"),
    ),
}


def shown(path: str) -> str:
    r"""Return the examples of a command as a section of its help page; `\b`: not to be wrapped."""
    examples = EXAMPLES.get(path, ())
    width = max((len(line) for line, _ in examples), default=0)
    lines = [f"  {line:{width}}  # {told}" for line, told in examples]
    if width + max((len(told) for _, told in examples), default=0) > 84:
        lines = [text for line, told in examples for text in (f"  # {told}", f"  {line}")]
    return "\n".join(["\b", "Examples:", *lines])
