"""How much memory a process may use: control groups of both versions, and those above them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.base import memory_limit
from dlfs.base.memory_limit import (
    allowed_bytes,
    allowed_memory,
    default_memory_bytes,
    default_service_bytes,
    describe_memory,
    describe_service_memory,
)
from dlfs.base.units import GIB, MIB, format_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process's directory in /proc, of which a test writes the files."""
    made = tmp_path / "proc"
    made.mkdir()
    monkeypatch.setattr(memory_limit, "PROC", made)
    allowed_memory.cache_clear()
    yield made
    allowed_memory.cache_clear()


def make_group(root: Path, path: str, name: str, value: str) -> None:
    group = root / path
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(value + "\n")


def mount_line(kind: str, root: str, point: Path, options: str) -> str:
    return f"35 31 0:32 {root} {point} rw,relatime shared:9 - {kind} {kind} {options}\n"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a/b": "max"}, MACHINE),
        ({"a/b": str(300 * MIB)}, 300 * MIB),
        ({"a/b": "max", "a": str(200 * MIB)}, 200 * MIB),
        ({"a/b": str(300 * MIB), "a": str(500 * MIB)}, 300 * MIB),
        ({"a/b": str(1 << 60)}, MACHINE),
        ({"other": str(MIB)}, MACHINE),
    ],
)
def test_version_2(proc: Path, tmp_path: Path, values: dict[str, str], expected: int) -> None:
    root = tmp_path / "cgroup"
    for path, value in values.items():
        make_group(root, path, "memory.max", value)
    (proc / "cgroup").write_text("0::/a/b\n")
    (proc / "mountinfo").write_text(mount_line("cgroup2", "/", root, "rw"))
    assert allowed_bytes() == expected


def test_version_1_beside_2(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    make_group(root / "memory", "pod/one", "memory.limit_in_bytes", str(450 * MIB))
    make_group(root / "memory", "", "memory.limit_in_bytes", str(9223372036854771712))
    make_group(root / "unified", "x", "memory.high", "max")
    (proc / "cgroup").write_text("4:cpu,memory:/pod/one\n1:name=systemd:/\n0::/x\n")
    lines = mount_line("cgroup", "/", root / "memory", "rw,memory")
    lines += mount_line("cgroup", "/", root / "cpu", "rw,cpu")
    (proc / "mountinfo").write_text(lines + mount_line("cgroup2", "/", root / "unified", "rw"))
    assert allowed_bytes() == 450 * MIB
    assert default_memory_bytes() == 450 * MIB // 8
    assert default_service_bytes() == 450 * MIB // 4


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../elsewhere"])
def test_in_a_container_that_sees_its_own_group_only(proc: Path, tmp_path: Path, path: str) -> None:
    root = tmp_path / "cgroup"
    make_group(root, "", "memory.max", str(64 * MIB))
    (proc / "cgroup").write_text(f"0::{path}\n")
    (proc / "mountinfo").write_text(mount_line("cgroup2", "/docker/abc", root, "rw"))
    assert allowed_bytes() == 64 * MIB


def test_without_groups(proc: Path) -> None:
    assert allowed_bytes() == MACHINE
    assert default_memory_bytes() == min(1024 * MIB, MACHINE // 8)
    assert default_service_bytes() == min(4 * GIB, MACHINE // 4)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 450 MiB."""
    for parent, name in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        made = Path("/sys/fs/cgroup") / parent / f"dlfs-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / name).write_text(str(450 * MIB))
        except OSError:
            made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip("no control group for memory can be made here")


def test_in_a_real_group(group: Path) -> None:
    code = (
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
        "from dlfs.base.memory_limit import *; print(allowed_bytes(), default_service_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(450 * MIB), str(450 * MIB // 4)]


def test_a_volume_is_opened_with_the_share(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    make_group(root, "", "memory.max", str(512 * MIB))
    (proc / "cgroup").write_text("0::/\n")
    (proc / "mountinfo").write_text(mount_line("cgroup2", "/", root, "rw"))
    dlfs.format_volume("mem:limited?size=8MiB", force=True)
    with dlfs.open("mem:limited") as volume:
        assert volume.session.options.memory_bytes == 64 * MIB


def test_the_default_is_described_with_its_limit(proc: Path, tmp_path: Path) -> None:
    """As info and the logs of mounts and services have it."""
    machine = f"{format_bytes(MACHINE)} (the machine's memory)"
    given = describe_memory(default_memory_bytes())
    assert given.startswith(format_bytes(default_memory_bytes()))
    assert given.endswith(f", by default 1/8 of {machine}, at most 1.0 GiB")
    assert describe_memory(MIB) == "1.0 MiB"
    allowed_memory.cache_clear()
    root = tmp_path / "cgroup"
    make_group(root, "a", "memory.max", str(64 * MIB))
    (proc / "cgroup").write_text("0::/a\n")
    (proc / "mountinfo").write_text(mount_line("cgroup2", "/", root, "rw"))
    limit = f"64.0 MiB (the limit of a control group, {root}/a/memory.max)"
    assert describe_memory(8 * MIB) == f"8.0 MiB, by default 1/8 of {limit}, at most 1.0 GiB"
    service = f"16.0 MiB, by default 1/4 of {limit}, at most 4.0 GiB"
    assert describe_service_memory(default_service_bytes()) == service
