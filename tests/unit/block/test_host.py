"""The NQN and ID of this host."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

import dlfs
from dlfs.block import host

MACHINE = "0123456789abcdef0123456789abcdef"
ID = "6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a"
OTHER = "0d1f4b7a-0c2f-4f0a-9d0e-2f6f6d1f4b7a"
PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = host.HostFiles(tmp_path / "hostnqn", tmp_path / "hostid", tmp_path / "machine-id")
    monkeypatch.setattr(host, "_FILES", files)
    return tmp_path


def test_is_what_the_machine_says(files: Path) -> None:
    (files / "hostnqn").write_text("nqn.2024-01.org.example:trainer\n")
    (files / "hostid").write_text(f"{ID}\n")
    assert host.host_nqn() == "nqn.2024-01.org.example:trainer"
    assert host.host_identity(None, None)[1] == UUID(ID)


def test_takes_the_id_out_of_the_nqn(files: Path) -> None:
    (files / "hostnqn").write_text(f"nqn.2014-08.org.nvmexpress:uuid:{ID}\n")
    assert host.host_identity(None, None)[1] == UUID(ID)


def test_is_derived_from_the_machine_and_does_not_tell_it(files: Path) -> None:
    (files / "machine-id").write_text(MACHINE + "\n")
    first, first_id = host.host_identity(None, None)
    assert first == host.host_nqn() == f"{PREFIX}{first_id}"
    assert first_id != UUID(MACHINE)
    (files / "machine-id").write_text(MACHINE.replace("0", "1"))
    assert host.host_nqn() != first


@pytest.mark.parametrize("machine", [None, "", "uninitialized", "\xff", MACHINE.upper()])
def test_a_machine_without_identity_says_what_to_write_where(
    files: Path, machine: str | None
) -> None:
    if machine is not None:
        (files / "machine-id").write_text(machine)
    with pytest.raises(dlfs.UsageError, match=r"expected them in .*write the NQN .* hostid=") as no:
        host.host_nqn()
    assert str(files / "hostnqn") in str(no.value)
    with pytest.raises(dlfs.UsageError, match="hostid="):
        host.host_identity("nqn.2024-01.org.example:trainer", None)
    own = UUID(ID)
    assert host.host_identity(f"{PREFIX}{ID}", None) == (f"{PREFIX}{ID}", own)
    assert host.host_identity("nqn.2024-01.org.example:a", own)[1] == own
    (files / "hostid").write_text(ID)
    assert host.host_identity(None, None) == (f"{PREFIX}{ID}", own)


@pytest.mark.parametrize("junk", ["hello", "nqn.x", "nqn.2024-01." + "x" * 300, "\xff"])
def test_malformed_files_are_named(files: Path, junk: str) -> None:
    (files / "machine-id").write_text(MACHINE)
    (files / "hostnqn").write_text(junk)
    with pytest.raises(dlfs.UsageError, match="hostnqn: expected an NQN"):
        host.host_nqn()
    (files / "hostnqn").unlink()
    (files / "hostid").write_text(junk)
    with pytest.raises(dlfs.UsageError, match="hostid: expected a UUID"):
        host.host_nqn()


def test_an_id_that_contradicts_the_nqn_is_named(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host._warn.cache_clear()
    (files / "hostnqn").write_text(f"{PREFIX}{ID}\n")
    (files / "hostid").write_text(f"{OTHER}\n")
    for _ in range(2):
        assert host.host_identity(None, None) == (f"{PREFIX}{ID}", UUID(OTHER))
    (text,) = caplog.messages
    assert f"the host ID {OTHER} contradicts the UUID in the host NQN {PREFIX}{ID}" in text
    host.host_identity(None, UUID(ID))
    host.host_identity(f"{PREFIX}{OTHER}", None)  # another host: the ID is that of its NQN
    host.host_identity("nqn.2024-01.org.example:trainer", UUID(OTHER))
    assert len(caplog.messages) == 1
    host.host_identity(f"{PREFIX}{OTHER}", UUID(ID))
    assert len(caplog.messages) == 2
