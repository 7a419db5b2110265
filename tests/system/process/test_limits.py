# SPDX-License-Identifier: Apache-2.0
"""`read_limits` on trees of files: v1, v2, hybrid, containers, and nothing at all."""

from __future__ import annotations

from pathlib import Path

from openenvd.system.memory.cgroup_tree import free_memory_bytes
from openenvd.system.memory.limits import available_memory_bytes, read_limits

MB = 1 << 20
GB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"
V1_MOUNTS = """\
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
"""
V2_MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def _tree(root: Path, files: dict[str, str]) -> Path:
    files = {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        "proc/cpuinfo": "".join(f"processor\t: {n}\n\n" for n in range(8)),
    } | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _v1(path: str, mounts: str = V1_MOUNTS) -> dict[str, str]:
    return {
        "proc/self/cgroup": f"4:memory:{path}\n3:cpu,cpuacct:{path}\n2:pids:{path}\n",
        "proc/self/mountinfo": mounts,
    }


def _v2(path: str, mounts: str = V2_MOUNTS) -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mounts}


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    limits = read_limits(str(_tree(tmp_path, {})))
    assert (limits.cpus, limits.memory_bytes, limits.pids) == (8, 16 * GB, None)
    assert limits.sources == {"cpus": "machine", "memory_bytes": "machine"}


def test_without_proc_the_machine_is_asked(tmp_path: Path) -> None:
    limits = read_limits(str(tmp_path))
    assert limits.memory_bytes == limits.machine_memory_bytes > 0


def test_affinity_below_the_machine_counts(tmp_path: Path) -> None:
    limits = read_limits(str(_tree(tmp_path, {})), affinity=2)
    assert (limits.cpus, limits.sources["cpus"]) == (2, "sched_getaffinity")


def test_v1_reads_every_level_of_the_path(tmp_path: Path) -> None:
    at = "sys/fs/cgroup"
    root = _tree(
        tmp_path,
        _v1("/a/b")
        | {
            f"{at}/memory/memory.limit_in_bytes": UNLIMITED_V1,
            f"{at}/memory/a/memory.limit_in_bytes": str(512 * MB),
            f"{at}/memory/a/b/memory.limit_in_bytes": str(750 * MB),
            f"{at}/cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n",
            f"{at}/cpu,cpuacct/a/b/cpu.cfs_quota_us": "50000\n",
            f"{at}/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
            f"{at}/pids/a/b/pids.max": "max\n",
            f"{at}/pids/a/pids.max": "300\n",
        },
    )
    limits = read_limits(str(root))
    assert (limits.cpus, limits.memory_bytes, limits.pids) == (0.5, 512 * MB, 300)
    assert limits.sources == {
        "cpus": "cgroup v1 cpu.cfs_quota_us at /a/b",
        "memory_bytes": "cgroup v1 memory.limit_in_bytes at /a",
        "pids": "cgroup v1 pids.max at /a",
    }


def test_v2_reads_every_level_and_the_throttle(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/user.slice"
    root = _tree(
        tmp_path,
        _v2("/user.slice/app.scope")
        | {
            f"{at}/memory.max": str(2 * GB),
            f"{at}/cpu.max": "max 100000\n",
            f"{at}/app.scope/memory.max": "max\n",
            f"{at}/app.scope/memory.high": str(GB),
            f"{at}/app.scope/cpu.max": "150000 100000\n",
            f"{at}/app.scope/pids.max": "100\n",
        },
    )
    limits = read_limits(str(root))
    assert (limits.cpus, limits.memory_bytes, limits.pids) == (1.5, GB, 100)
    assert limits.sources["memory_bytes"] == "cgroup v2 memory.high at /user.slice/app.scope"


def test_hybrid_takes_each_controller_where_it_is(tmp_path: Path) -> None:
    """Memory in v1, the v2 tree mounted beside it without controllers."""
    v2 = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n0::/u\n",
            "proc/self/mountinfo": V1_MOUNTS + v2,
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(300 * MB),
            "sys/fs/cgroup/unified/u/cpu.max": "200000 100000",
        },
    )
    limits = read_limits(str(root))
    assert (limits.cpus, limits.memory_bytes) == (2.0, 300 * MB)


def test_container_on_v1_sees_its_group_at_the_top_of_the_mount(tmp_path: Path) -> None:
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    root = _tree(
        tmp_path,
        _v1("/docker/abc/inner", mounts)
        | {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(750 * MB),
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": UNLIMITED_V1,
        },
    )
    assert read_limits(str(root)).sources["memory_bytes"] == "cgroup v1 memory.limit_in_bytes at /"


def test_group_outside_of_what_is_mounted_is_read_at_the_top(tmp_path: Path) -> None:
    """Nested containers: the path is from another name space's point of view."""
    for number, path in enumerate(("/../../outer", "/not/mounted/here")):
        root = _tree(
            tmp_path / str(number),
            _v2(path) | {"sys/fs/cgroup/memory.max": str(GB)},
        )
        assert read_limits(str(root)).memory_bytes == GB


def test_a_limit_above_the_machine_is_the_machine(tmp_path: Path) -> None:
    root = _tree(tmp_path, _v2("/") | {"sys/fs/cgroup/memory.max": str(64 * GB)})
    assert read_limits(str(root)).sources["memory_bytes"] == "machine"


def test_this_machine_has_limits_within_the_machine() -> None:
    limits = read_limits()
    assert 0 < limits.cpus <= limits.machine_cpus
    assert 0 < limits.memory_bytes <= limits.machine_memory_bytes


def test_what_is_available_is_the_machine_s_where_no_group_has_a_limit(tmp_path: Path) -> None:
    assert available_memory_bytes(str(_tree(tmp_path, {}))) == 8 * GB


def test_what_is_available_in_a_v1_group_counts_its_page_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        **_v1("/job"),
        f"{group}/memory.limit_in_bytes": str(750 * MB),
        f"{group}/memory.usage_in_bytes": str(700 * MB),
        f"{group}/memory.stat": f"total_inactive_file {150 * MB}\ntotal_active_file {50 * MB}\n",
    }
    assert available_memory_bytes(str(_tree(tmp_path, files))) == 250 * MB


def test_what_is_available_is_the_least_of_all_levels_of_a_v2_path(tmp_path: Path) -> None:
    outer, inner = "sys/fs/cgroup/outer", "sys/fs/cgroup/outer/inner"
    files = {
        **_v2("/outer/inner"),
        f"{outer}/memory.max": str(500 * MB),
        f"{outer}/memory.current": str(600 * MB),  # the kernel is about to act
        f"{inner}/memory.max": str(400 * MB),
        f"{inner}/memory.current": str(100 * MB),
    }
    assert available_memory_bytes(str(_tree(tmp_path, files))) == 0


def test_what_a_server_may_use_is_bounded_by_its_own_group_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/openenvd/echo"
    files = {f"{group}/memory.max": str(400 * MB), f"{group}/memory.current": str(100 * MB)}
    root = _tree(tmp_path, _v2("/openenvd/echo") | files)
    assert free_memory_bytes(str(root)) == 300 * MB
    assert available_memory_bytes(str(root)) == 8 * GB  # to others: that limit is our own doing


def test_where_nobody_says_it_is_not_known_what_a_server_may_use(tmp_path: Path) -> None:
    assert free_memory_bytes(str(tmp_path)) is None
