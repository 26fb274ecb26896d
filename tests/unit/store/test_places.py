"""Location records that name places which the caller did not give: they are not followed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, MemoryDevice, open_device, parse_uri
from dlfs.format.constants import LOCATION_RECORD_BYTES_MAX, LOCATION_RECORD_OFFSET_BYTES
from dlfs.format.locations import LocationRecord
from dlfs.store.places import RefusedError, follow
from dlfs.store.recorded import RECORDS_MAX, open_members
from tests.golden import c_reader
from tests.support.devices import WrappingDevice
from tests.support.files import write_at
from tests.support.nvme import DiscoveryRecord, ScriptedTarget
from tests.unit.store.nodes import asking, nqn, serve, subsystem

SIZE = 3 * MIB
NAME = "nqn.2024-01.org.example"


# ---- the rule ------------------------------------------------------------------------------------


def chosen(recorded: str, *given: str) -> str:
    return follow(recorded, given, open_device)[0]


def test_files_are_followed_within_a_directory() -> None:
    assert chosen("/data/v1", "/data/v0") == "/data/v1"
    assert chosen("file:/data/a%2Cb", "/data/v0") == "file:/data/a%2Cb"
    assert chosen("/data/x/../v1", "/data/v0") == "/data/v1"
    for other in ("/data/x/v1", "/data/../etc/v1", "/v1", "file:/data/%2e%2e/etc/v1"):
        with pytest.raises(RefusedError, match=r"no given file is in the directory .*add it to"):
            chosen(other, "/data/v0", f"nvme-tcp://10.0.0.1/{NAME}:a?nsid=1")


def test_files_are_followed_to_where_the_links_of_a_given_name_lead(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    assert chosen(f"{tmp_path}/there/v1", f"{tmp_path}/link/v0") == f"{tmp_path}/there/v1"
    with pytest.raises(RefusedError, match="no given file is in the directory"):
        chosen(f"{tmp_path}/link/v1", f"{tmp_path}/there/v0")  # only the caller's links are


def test_hosts_are_followed_with_the_options_of_the_given_uri() -> None:
    given = f"nvme-tcp://node1/{NAME}:a?nsid=1&dhchap_key=own&timeout_ms=7000"
    other = f"nvme-tcp://node1/{NAME}:b?nsid=1&dhchap_key=own-b"
    assert chosen(
        f"nvme-tcp://NODE1:4421/{NAME}:c?nsid=3&dhchap_key=x&hostnqn={NAME}:h", given
    ) == (f"nvme-tcp://NODE1:4421/{NAME}:c?nsid=3&timeout_ms=7000&dhchap_key=own")
    assert "dhchap_key=own-b" in chosen(f"nvme-tcp://node1/{NAME}:b?nsid=2", given, other)
    two_paths = f"nvme-tcp://10.0.0.9/{NAME}:a?nsid=2&path=[fe80:0::1]"
    found = chosen(two_paths, f"nvme-tcp://[fe80::1]/{NAME}:a?nsid=1")
    assert found == f"nvme-tcp://[fe80:0::1]:4420/{NAME}:a?nsid=2"  # the known path alone
    for uri in (f"nvme-tcp://node2/{NAME}:a?nsid=1", "nvme-tcp+discover://node1"):
        with pytest.raises(RefusedError, match="was not opened"):
            chosen(uri, given)
    with pytest.raises(RefusedError, match="no given URI is of the host 'node1'"):
        chosen(given, "/data/v0", "mem:x")


def test_spdk_is_followed_to_the_same_address() -> None:
    given = f"spdk:trtype=TCP traddr=10.0.0.1 subnqn={NAME}:a hostnqn={NAME}:h nsid=1 cores=1"
    assert chosen(f"spdk:trtype=tcp traddr=10.0.0.1 subnqn={NAME}:b nsid=2 cores=7", given) == (
        f"spdk:trtype=TCP traddr=10.0.0.1 subnqn={NAME}:b hostnqn={NAME}:h nsid=2 cores=1"
    )
    for uri in (
        f"spdk:trtype=TCP traddr=10.0.0.2 subnqn={NAME}:b nsid=2",
        f"spdk:trtype=RDMA traddr=10.0.0.1 subnqn={NAME}:b nsid=2",
        "spdk:trtype=PCIe traddr=0000:5e:00.0 nsid=1",
        f"nvme-tcp://10.0.0.1/{NAME}:b?nsid=2",
    ):
        with pytest.raises(RefusedError, match="was not opened"):
            chosen(uri, given, "spdk:trtype=PCIe traddr=0000:5f:00.0 nsid=1")


def test_memory_is_followed_if_it_exists() -> None:
    with pytest.raises(RefusedError, match="this process has no such memory"):
        chosen("mem:64MiB", "mem:x")
    with MemoryDevice("places-test", 1 * MIB):
        assert chosen("mem:places-test", "mem:x") == "mem:places-test"
    MemoryDevice.forget("places-test")
    for odd in ("", "unix:/run/dlfs.sock", "http://10.0.0.1/x", "/data/\0"):
        with pytest.raises(RefusedError, match="malformed"):
            chosen(odd, "/data/v0")


# ---- volumes -------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A volume of two groups on files; the second was added."""
    (tmp_path / "given").mkdir()
    made = [str(tmp_path / "given" / f"member{number}") for number in range(4)]
    dlfs.format_volume(made[:2], size_bytes=SIZE, chunk_bytes=16 * KIB, replicas=2)
    with dlfs.open(made[:2]) as volume:
        volume.grow(made[2:], size_bytes=SIZE)
        fill(volume)
    return made


def fill(volume: dlfs.Volume) -> None:
    with volume.writer("data") as writer:
        writer.add("a", b"sample")


def read_record(file: str) -> LocationRecord:
    with open(file, "rb") as opened:
        opened.seek(LOCATION_RECORD_OFFSET_BYTES)
        found = LocationRecord.decode(opened.read(LOCATION_RECORD_BYTES_MAX))
    assert found is not None
    return found


def rename(file: str, names: dict[str, str]) -> None:
    """Change URIs of the location record on a device."""
    found = read_record(file)
    uris = {uuid: names.get(uri, uri) for uuid, uri in found.uris.items()}
    content = LocationRecord(found.volume_uuid, found.generation, uris).encode()
    write_at(file, LOCATION_RECORD_OFFSET_BYTES, content)


@contextmanager
def trap(host: str) -> Iterator[tuple[int, Callable[[], bool]]]:
    """Listen at an address; yields the port, and a function that says whether anyone connected."""
    with socket.create_server((host, 0)) as listener:
        listener.setblocking(False)

        def was_touched() -> bool:
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        yield listener.getsockname()[1], was_touched


def test_a_record_does_not_lead_to_another_host(files: list[str]) -> None:
    with trap("127.0.0.1") as (port, was_touched):
        evil = f"nvme-tcp://127.0.0.1:{port}/{NAME}:evil?nsid=1&connect_ms=1000&reconnect_ms=0"
        for file in files[:2]:
            rename(file, {files[2]: evil, files[3]: evil})
        with pytest.raises(dlfs.NotFoundError, match=r"no given URI is of the host '127.0.0.1'"):
            dlfs.open(files[:2])
        with pytest.raises(c_reader.Failed, match="was not opened: no given URI is of that host"):
            c_reader.read_volume(files[:2])
        with pytest.raises(dlfs.NotFoundError):
            dlfs.repair(files[:2])
        assert not was_touched()
        with dlfs.open(files) as volume, volume["data"] as dataset:  # nothing is refused
            assert dataset.get("a") == b"sample"
            assert {member.state for member in volume.members} == {"current"}
        assert not was_touched()
    assert evil in read_record(files[0]).uris.values()


def command(*arguments: str) -> str:
    """Run a verb in another process; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "dlfs.cli", *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_info_shows_what_was_refused(files: list[str], tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "member3")
    shutil.move(files[3], elsewhere)
    for file in files[:3]:
        rename(file, {files[3]: elsewhere})
    with dlfs.open(files[0]) as volume, volume["data"] as dataset:  # the other copies are enough
        (absent,) = [member for member in volume.members if member.state != "current"]
        assert absent.number == 3
        assert "was not opened: no given file is in the directory" in (absent.reason or "")
        assert elsewhere not in volume.uri
        assert dataset.get("a") == b"sample"
        volume.refresh()
        with dlfs.open(volume.uri) as again:
            assert [member.state for member in again.members] == [
                member.state for member in volume.members
            ]
    assert "a device of the volume names it, and it was not opened" in command("info", files[0])
    assert (b"data", 1) in c_reader.read_volume(files[:1])
    with dlfs.open([*files[:3], elsewhere]) as volume:
        assert {member.state for member in volume.members} == {"current"}


def test_a_file_system_node_that_is_no_file_is_not_opened(tmp_path: Path) -> None:
    for path in ("/dev/null", str(tmp_path)):
        with pytest.raises(dlfs.DlfsError, match="expected a regular file or a block device"):
            open_device(path)


class Misleading(WrappingDevice):
    """A device that left its volume, whose record is newer at every read and names others."""

    reads = 0

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        if offset_bytes == LOCATION_RECORD_OFFSET_BYTES:
            number = Misleading.reads = Misleading.reads + 1
            folder = Path(parse_uri(self.uri).path).parent  # type: ignore[union-attr]
            uris = {UUID(int=i): f"{folder}/{number}-{i}" for i in range(1, 60)}
            uris[UUID(int=99)] = str(folder / "left")
            record = LocationRecord(UUID(int=1), number, uris)
            content = record.encode()
            return content + bytes(length_bytes - len(content))
        return super().read(offset_bytes, length_bytes)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("same", [True, False])
def test_a_chain_of_records_ends(tmp_path: Path, *, same: bool) -> None:
    left = tmp_path / "left"
    left.write_bytes(bytes(SIZE))
    opened: list[str] = []

    def opener(uri: str, *, writable: bool) -> BlockDevice:
        opened.append(uri)
        path = str(left) if uri == str(left) or not same else uri
        return Misleading(open_device(path, writable=writable))

    Misleading.reads = 0
    if same:  # each record names the same device again, and others that are not there
        devices = open_members([str(left)], opener=opener)
        for device in devices:
            device.close()
    else:  # each record names devices that were not asked before
        with pytest.raises(dlfs.FormatError, match=f"expected at most {RECORDS_MAX} devices"):
            open_members([str(left)], opener=opener)
    assert len(opened) < 2 * RECORDS_MAX
    assert threading.active_count() < 20


# ---- discovery -----------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_node_that_the_callers_discovery_names_is_followed(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.write_bytes(bytes(SIZE))
    dlfs.format_volume(str(first), size_bytes=SIZE, chunk_bytes=16 * KIB)
    quick = "timeout_ms=2000&connect_ms=1000&reconnect_ms=1000"
    there = ScriptedTarget([subsystem("b", [serve(second)])])
    there.addresses = ["127.0.0.2"]
    with ScriptedTarget([subsystem("a", [serve(first)])]) as here, there:
        one = f"nvme-tcp://127.0.0.1:{here.port}/{nqn('a')}?nsid=1&{quick}"
        two = f"nvme-tcp://127.0.0.2:{there.port}/{nqn('b')}?nsid=1&{quick}"
        with dlfs.open(asking(here, options=quick)) as reader, dlfs.open(one) as plain:
            command("grow", one, two)  # this process does not get to know of it
            with pytest.raises(dlfs.NotFoundError, match="no given URI is of the host"):
                plain.refresh()
            with pytest.raises(dlfs.NotFoundError, match="no given URI is of the host"):
                reader.refresh()
            here.list_also([DiscoveryRecord(nqn("b"), "127.0.0.2", there.port)])
            reader.refresh()
            assert len(reader.members) == 2
            fill(reader)
            with reader["data"] as dataset:
                assert dataset.get("a") == b"sample"
        with dlfs.open([one, two]) as volume:
            assert len(volume.members) == 2
