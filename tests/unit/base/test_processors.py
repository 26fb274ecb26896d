"""How many processors a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlfs.base.processors import allowed_processors

MANY = set(range(64))


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: MANY)


def make_group(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (group / name.replace("__", ".")).write_text(value + "\n")


def mount(proc: Path, kind: str, root: Path, options: str, groups: str) -> None:
    proc.mkdir()
    line = f"35 31 0:32 / {root} rw,relatime shared:9 - {kind} {kind} {options}\n"
    (proc / "mountinfo").write_text(line)
    (proc / "cgroup").write_text(groups)


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"pod/one": "max 100000"}, 64),
        ({"pod/one": "200000 100000"}, 2),
        ({"pod/one": "150000 100000"}, 2),
        ({"pod/one": "10000 100000"}, 1),
        ({"pod/one": "max 100000", "pod": "300000 100000"}, 3),
        ({"pod/two": "100000 100000"}, 64),
    ],
)
def test_version_2(tmp_path: Path, quotas: dict[str, str], expected: int) -> None:
    for group, quota in quotas.items():
        make_group(tmp_path / "groups" / group, cpu__max=quota)
    mount(tmp_path / "proc", "cgroup2", tmp_path / "groups", "rw", "0::/pod/one\n")
    assert allowed_processors(tmp_path / "proc") == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 64), ("400000", 4)])
def test_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"cpu__cfs_quota_us": quota, "cpu__cfs_period_us": "100000"}
    make_group(tmp_path / "groups/pod", **files)
    groups = "4:cpu,cpuacct:/pod\n0::/other\n"
    mount(tmp_path / "proc", "cgroup", tmp_path / "groups", "rw,cpu,cpuacct", groups)
    assert allowed_processors(tmp_path / "proc") == expected


def test_the_affinity_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5})
    assert allowed_processors(tmp_path / "none") == 2
