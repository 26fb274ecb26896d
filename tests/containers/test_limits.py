"""A container with a limit of memory reads a volume four times as large, by defaults.

The kernel kills a process of the container as soon as its memory, which includes that of a mount's
server and of a service in it, is over the limit. Files that are read in pages of the kernel's cache
count, too, and can be given back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import GIB, MIB
from tests.containers.podman import Podman

pytestmark = [pytest.mark.containers]

LIMIT_BYTES = 512 * MIB
SAMPLE_BYTES = 64 << 10
COUNT = 4 * LIMIT_BYTES // SAMPLE_BYTES
EPOCH = f"""
def read(volume):
    found = set()
    with volume, volume["d"] as dataset:
        for batch in dataset.batches(64, seed=1):
            with batch:
                found.update(bytes(sample[-8:]) for sample in batch)
    assert found == {{number.to_bytes(8) for number in range({COUNT})}}, len(found)
"""
API = f"{EPOCH}\nimport dlfs\nread(dlfs.open('/data/v.img'))\n"
SERVICE = f"""{EPOCH}
import subprocess, dlfs
service = "/tmp/s.sock"
subprocess.run(["dlfs", "serve", "/data/v.img", "--socket", service, "--background"], check=True)
read(dlfs.connect(f"unix:{{service}}"))
subprocess.run(["dlfs", "stop", f"unix:{{service}}"], check=True)
"""
MOUNT = f"""
import subprocess
from pathlib import Path
point = Path("/tmp/mnt")
point.mkdir()
subprocess.run(["dlfs", "mount", "/data/v.img", point], check=True)
for number in range({COUNT}):
    data = (point / f"d/{{number:06}}").read_bytes()
    assert (len(data), data[-8:]) == ({SAMPLE_BYTES}, number.to_bytes(8))
subprocess.run(["dlfs", "umount", point], check=True)
"""
KILLS = """
print(open("/sys/fs/cgroup/memory/memory.oom_control").read())
print(open("/sys/fs/cgroup/memory/memory.limit_in_bytes").read())
"""


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a volume whose samples end with their numbers."""
    path = tmp_path_factory.mktemp("limits") / "v.img"
    dlfs.format_volume(str(path), size_bytes=COUNT * SAMPLE_BYTES + GIB // 4)
    rest = bytes(range(256)) * (SAMPLE_BYTES // 256)
    with dlfs.open(str(path)) as opened, opened.writer("d") as writer:
        for number in range(COUNT):
            writer.add(f"{number:06}", rest[8:] + number.to_bytes(8))
    path.parent.chmod(0o755)
    path.chmod(0o644)
    yield path
    path.unlink()


@pytest.mark.parametrize(
    ("program", "root"),
    [
        pytest.param(API, False, id="api"),
        pytest.param(MOUNT, True, id="mount"),
        pytest.param(SERVICE, False, id="service"),
    ],
)
def test_it_reads_by_defaults(podman: Podman, volume: Path, program: str, root: bool) -> None:
    options = [f"--volume={volume.parent}:/data", f"--memory={LIMIT_BYTES}"]
    done = podman.python(program + KILLS, options=options, root_for_mounts=root)
    assert "oom_kill 0" in done.stdout
    assert str(LIMIT_BYTES) in done.stdout
