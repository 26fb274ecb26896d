"""Two ports of one kernel target whose ANA states are toggled while samples are read.

The guest toggles them as long as it runs. DLFS_ANA_TOGGLES asks for more moves than usual.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import NvmeTcpDevice, open_device
from tests.nvmet.guest import Disk, Guest, free_port
from tests.nvmet.target import Subsystem, target_script
from tests.nvmet.volumes import LARGE, MEMORY_BYTES, add_large, assert_whole, read_epoch

pytestmark = pytest.mark.qemu

NQN = "nqn.2024-01.org.dlfs.test:ana"
MOVES = int(os.environ.get("DLFS_ANA_TOGGLES", "6"))
PAGE = 4096
TIMES = {"timeout_ms": 120_000, "connect_ms": 10_000, "reconnect_ms": 120_000}
"""A command that is lost times out, however long that takes. On a busy machine an emulated target
may need many seconds for an answer, which must not look like it."""

# Each state of port 1 stands for the opposite state of port 2. Each step lasts a second or two:
# an emulated target needs a part of it to accept the connections.
_TOGGLING = """
cd /sys/kernel/config/nvmet
mkdir ports/2
for key in addr_trtype addr_adrfam addr_traddr; do cat ports/1/$key >ports/2/$key; done
echo -n SECOND >ports/2/addr_trsvcid
echo inaccessible >ports/2/ana_groups/1/ana_state
ln -s /sys/kernel/config/nvmet/subsystems/NQN ports/2/subsystems/
step() {
    echo "$2" >ports/2/ana_groups/1/ana_state
    echo "$1" >ports/1/ana_groups/1/ana_state
    sleep 1
}
while :; do
    step inaccessible optimized
    step optimized inaccessible
    step change non-optimized
    step non-optimized persistent-loss
    step persistent-loss optimized
    step optimized change
done </dev/null >/dev/null 2>&1 &
"""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Write a volume to a file, start a target that serves it, and return its URI."""
    folder = tmp_path_factory.mktemp("ana")
    path: Path = folder / "disk"
    with path.open("ab") as file:
        file.truncate(24 * MIB)
    dlfs.format_volume(str(path))
    with dlfs.open(str(path)) as volume:
        add_large(volume)
    first, second = free_port(), free_port()
    script = target_script([Subsystem(NQN)], first, 16384)
    script += _TOGGLING.replace("SECOND", str(second)).replace("NQN", NQN)
    (folder / "guest").mkdir()
    options = "".join(f"&{name}={value}" for name, value in TIMES.items())
    with Guest(folder / "guest", script, disks=[Disk(path)], ports=[first, second]) as guest:
        guest.wait_until_ready()
        yield f"nvme-tcp://127.0.0.1:{first}/{NQN}?nsid=1&path=127.0.0.1:{second}{options}"


def read_pages(device: NvmeTcpDevice, expected: bytes, stop: threading.Event) -> int:
    """Read pages in turn until the device has moved often enough; return their number."""
    reads = 0
    while device.status().path_moves < MOVES:
        offset = reads * PAGE % len(expected)
        assert device.read(offset, PAGE) == expected[offset : offset + PAGE]
        reads += 1
    stop.set()
    return reads


@pytest.mark.timeout(120 + 6 * MOVES)
def test_no_sample_is_lost_while_the_states_are_toggled(uri: str) -> None:
    enough = threading.Event()
    epochs = 0
    with dlfs.open(uri, memory_bytes=MEMORY_BYTES) as volume, open_device(uri) as device:
        assert isinstance(device, NvmeTcpDevice)
        expected = device.read(0, MIB)
        counted: list[int] = []
        thread = threading.Thread(
            target=lambda: counted.append(read_pages(device, expected, enough))
        )
        thread.start()
        with volume.dataset("large") as large:
            while not enough.is_set() and thread.is_alive():
                assert_whole(read_epoch(large, epochs), LARGE)
                epochs += 1
        thread.join()
        status = device.status()
    assert counted
    print(f"{status.path_moves} moves, {epochs} epochs, {counted[0]} pages, {status}")
    assert status.path_moves >= MOVES
    assert status.protocol_errors == status.timeouts == 0
