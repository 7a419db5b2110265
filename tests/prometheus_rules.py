# SPDX-License-Identifier: Apache-2.0
"""The rules of `promtool check metrics`, as far as a page of ours can break them.

Source: https://github.com/prometheus/client_golang, prometheus/testutil/promlint, validations.
"""

import re
from collections import defaultdict

TYPES = ("counter", "gauge", "histogram", "summary")
NOT_BASE_UNITS = frozenset(
    {"milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "ms", "us", "ns"}
    | {"kilobytes", "megabytes", "gigabytes", "kb", "mb", "gb", "bits", "percent", "celsius"}
)
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>(?:\w+=\"(?:[^\"\\\n]|\\[\\\"n])*\",?)*)\})? "
    r"(?P<value>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|NaN|[+-]Inf)"
)


def lint(page: str) -> list[str]:
    """What is wrong with a page of metrics, by name."""
    helps: dict[str, str] = {}
    kinds: dict[str, str] = {}
    labels: dict[str, set[str]] = defaultdict(set)
    wrong = []
    seen: set[str] = set()
    for line in page.splitlines():
        if line.startswith("# HELP "):
            name, _, text = line.removeprefix("# HELP ").partition(" ")
            helps[name] = text
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            wrong += [f"{name}: declared twice"] if name in kinds else []
            kinds[name] = kind
        elif (sample := _SAMPLE.fullmatch(line)) is None:
            wrong.append(f"no sample: {line}")
        else:
            wrong += [f"the same sample twice: {line}"] if line.rpartition(" ")[0] in seen else []
            seen.add(line.rpartition(" ")[0])
            labels[sample["name"]] |= set(re.findall(r"(\w+)=\"", sample["labels"] or ""))
    wrong += [f"{name}: not declared" for name in labels if name not in kinds]
    for name, kind in kinds.items():
        wrong += [f"{name}: {why}" for why in _of_family(name, kind, helps, labels[name])]
    return wrong


def _of_family(name: str, kind: str, helps: dict[str, str], labels: set[str]) -> list[str]:
    words = name.split("_")
    rules = {
        "no help": not helps.get(name),
        f"no type {kind!r}": kind not in TYPES,
        "a counter ends in _total": kind == "counter" and words[-1] != "total",
        "only a counter ends in _total": kind != "counter" and words[-1] == "total",
        "ends in _count, _sum or _bucket": words[-1] in ("count", "sum", "bucket"),
        "its name has its type": kind in words,
        "not a base unit": bool(NOT_BASE_UNITS & set(words)),
        "camelCase": bool(re.search(r"[a-z][A-Z]", name)),
        "a colon is for recording rules": ":" in name,
        "`le` is for histograms": "le" in labels and kind != "histogram",
        "`quantile` is for summaries": "quantile" in labels and kind != "summary",
    }
    return [rule for rule, is_broken in rules.items() if is_broken]
