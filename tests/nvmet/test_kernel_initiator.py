"""The Linux kernel's initiator, in a guest, against the scripted target without faults."""

from __future__ import annotations

import hashlib
import random

import pytest

from tests.nvmet.guest import HOST_ADDRESS, run_in_guest
from tests.nvmet.shared import ALLOWED_HOST
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem

DATA_BYTES = 1 << 20
DIGESTS = ",hdr_digest,data_digest"

# The script connects for each line of options, prints the contents, and writes other data in
# requests of several sizes. It compares each with a read that bypasses the page cache, prints the
# data written last, and disconnects.
SCRIPT = """
set -e
wait_for() {
    tries=0
    until eval "$1"; do
        usleep 20000
        tries=$((tries + 1))
        [ $tries -lt 5000 ]
    done
}
while read -r options; do
    echo "$options" >/dev/nvme-fabrics
    wait_for '[ -b /dev/nvme0n1 ]'
    cat /sys/block/nvme0n1/queue/logical_block_size
    dd if=/dev/nvme0n1 bs=64k count=16 iflag=direct 2>/dev/null | sha256sum
    for kib in 4 16 128 1024; do
        dd if=/dev/urandom of=data bs=1M count=1 2>/dev/null
        dd if=data of=/dev/nvme0n1 bs=${kib}k oflag=direct conv=fsync 2>/dev/null
        dd if=/dev/nvme0n1 of=back bs=${kib}k count=$((1024 / kib)) iflag=direct 2>/dev/null
        cmp data back
    done
    sha256sum <data
    echo 1 >/sys/class/nvme/nvme0/delete_controller
    wait_for '[ ! -e /sys/class/nvme/nvme0 ]'
done </options
"""


def options_line(target: ScriptedTarget, subsystem: Subsystem, extra: str) -> str:
    """Return the line of options that /dev/nvme-fabrics expects."""
    host_id = ALLOWED_HOST.rpartition(":")[2]
    return (
        f"transport=tcp,traddr={HOST_ADDRESS},trsvcid={target.port},nqn={subsystem.nqn},"
        f"hostnqn={ALLOWED_HOST},hostid={host_id}{extra}\n"
    )


@pytest.mark.qemu
def test_the_kernel_reads_writes_and_compares() -> None:
    subsystems = [
        Subsystem(f"nqn.2024-01.org.dlfs.test:{size}", [Namespace(DATA_BYTES, block_bytes=size)])
        for size in (512, 4096)
    ]
    before = [random.Random(seed).randbytes(DATA_BYTES) for seed in range(2)]
    for subsystem, data in zip(subsystems, before, strict=True):
        subsystem.namespaces[1].write(0, data)
    with ScriptedTarget(subsystems) as target:
        lines = [
            options_line(target, subsystem, extra)
            for subsystem, extra in zip(subsystems, ("", DIGESTS), strict=True)
        ]
        result = run_in_guest(SCRIPT, files={"options": "".join(lines).encode()})
        assert result.code == 0, result.output
        assert target.violations == []
    after = [bytes(subsystem.namespaces[1].contents) for subsystem in subsystems]
    assert after[0] != before[0]
    expected = [
        word
        for size, *contents in zip((512, 4096), before, after, strict=True)
        for word in (str(size), *(hashlib.sha256(data).hexdigest() for data in contents))
    ]
    assert result.output.replace("  -", "").split() == expected
