"""``dlfs compose``, on a folder like configfs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.fabric.configfs import FakeConfigfs

HOST = "nqn.2024-01.org.example:trainer"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in FakeConfigfs(tmp_path).environment(os.environ).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def create(run, store: Path, name: str, *words: str):
    where = ("--store", str(store), "-a", "10.0.0.11", "--allow", HOST)
    return run("compose", "create", name, "--size", "2MiB", *where, *words)


def test_create_prints_the_uri(run, store: Path) -> None:
    done = create(run, store, "a", "--nqn", "nqn.2024-01.org.example:a")
    uri = "nvme-tcp://10.0.0.11:4420/nqn.2024-01.org.example:a?nsid=1"
    assert (done.code, done.out.decode()) == (0, f"{uri}\n")
    assert f"a: 2 MiB in {store}/a.namespace" in done.err
    listed = json.loads(run("compose", "ls", "--json").out)
    assert [(one["name"], one["uri"]) for one in listed["namespaces"]] == [("a", uri)]
    assert json.loads(create(run, store, "a", "--nqn", "nqn.2024-01.org.example:a", "--json").out)[
        "allowed_hosts"
    ] == [HOST]


def test_resize_and_withdraw(run, store: Path) -> None:
    for name in ("a", "b"):
        assert create(run, store, name).code == 0
    done = run("compose", "resize", "a", "1MiB")
    assert (done.code, "--shrink loses the bytes" in done.err) == (2, True)
    done = run("compose", "resize", "a", "4MiB", "--json")
    assert json.loads(done.out)["size_bytes"] == 4 << 20
    done = run("compose", "withdraw", "--all", "--delete")
    assert (done.code, "--yes to delete the bytes" in done.err) == (2, True)
    done = run("compose", "withdraw", "--all", "--delete", "--yes")
    assert (done.code, list(store.iterdir())) == (0, [])
    done = run("compose", "withdraw", "a")
    assert (done.code, "there are: none" in done.err) == (3, True)
