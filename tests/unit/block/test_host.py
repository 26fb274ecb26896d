"""The NQN and ID of this host."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from dlfs.block import host

MACHINE = "0123456789abcdef0123456789abcdef"
ID = "6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_NQN_FILE", tmp_path / "hostnqn")
    monkeypatch.setattr(host, "_ID_FILE", tmp_path / "hostid")
    monkeypatch.setattr(host, "_MACHINE_FILE", tmp_path / "machine-id")
    host._generated_id.cache_clear()
    yield tmp_path
    host._generated_id.cache_clear()


def test_is_what_the_machine_says(files: Path) -> None:
    (files / "hostnqn").write_text("nqn.2024-01.org.example:trainer\n")
    (files / "hostid").write_text(f"{ID}\n")
    assert host.host_nqn() == "nqn.2024-01.org.example:trainer"
    assert host.host_id() == UUID(ID)


def test_takes_the_id_out_of_the_nqn(files: Path) -> None:
    (files / "hostnqn").write_text(f"nqn.2014-08.org.nvmexpress:uuid:{ID}\n")
    assert host.host_id() == UUID(ID)


def test_is_derived_from_the_machine_and_does_not_tell_it(files: Path) -> None:
    (files / "machine-id").write_text(MACHINE + "\n")
    first = host.host_nqn()
    host._generated_id.cache_clear()
    assert first == host.host_nqn() == f"nqn.2014-08.org.nvmexpress:uuid:{host.host_id()}"
    assert host.host_id() != UUID(MACHINE)
    (files / "machine-id").write_text(MACHINE.replace("0", "1"))
    host._generated_id.cache_clear()
    assert host.host_nqn() != first


@pytest.mark.parametrize("junk", ["", "hello", "nqn.x", "nqn.2024-01." + "x" * 300, "\xff"])
def test_is_generated_id_when_nothing_says_it(files: Path, junk: str) -> None:
    for name in ("hostnqn", "hostid", "machine-id"):
        (files / name).write_text(junk)
    assert host.host_nqn() == host.host_nqn()
    assert host.host_nqn().endswith(str(host.host_id()))
