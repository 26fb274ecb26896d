"""Two storage nodes with real kernels, exported by their recipes, and a volume over both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import dlfs
from dlfs.fabric.recipes import Export, nvmet_script
from tests.nvmet.guest import Disk, Guest, free_port
from tests.support.volumes import write_dataset

HOST = "nqn.2024-01.org.example:trainer"
SAMPLES = {f"{number:03}": bytes([number]) * (1000 + 700 * number) for number in range(100)}


class Node:
    """A storage node: its disk and its exports."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        disk = folder / "disk"
        disk.write_bytes(bytes(16 << 20))
        self.export = Export(
            device="/dev/vda",
            address="127.0.0.1",
            allowed_hosts=(HOST,),
            nqn=f"nqn.2024-01.org.example:{name}",
            port=free_port(),
            discovery_port=free_port(),
        )
        self.guest = Guest(
            folder,
            "sh /export.sh start",
            files={"export.sh": nvmet_script(self.export).encode()},
            disks=[Disk(disk)],
            ports=self.export.ports,
        )

    @property
    def discovery_uri(self) -> str:
        return f"nvme-tcp+discover://127.0.0.1:{self.export.discovery_port}?hostnqn={HOST}"

    @property
    def uri(self) -> str:
        return f"nvme-tcp://127.0.0.1:{self.export.port}/{self.export.nqn}?nsid=1&hostnqn={HOST}"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        nodes = [Node(tmp_path / name, name) for name in ("storage-a", "storage-b")]
        for node in nodes:
            stack.enter_context(node.guest)
        for node in nodes:
            node.guest.wait_until_ready()
        yield nodes


@pytest.mark.qemu
def test_a_volume_over_two_storage_nodes(nodes: list[Node]) -> None:
    a, b = nodes
    dlfs.format_volume([a.uri, b.uri], label="pool")
    uris = [b.discovery_uri, a.discovery_uri]
    write_dataset(uris, "samples", SAMPLES)
    with dlfs.open(uris) as volume:
        assert list(volume.verify()) == []
        found = {}
        for batch in volume["samples"].batches(16, seed=1, epoch=0, shuffle="global"):
            with batch:
                found |= dict(zip(batch.indices.tolist(), batch.to_list(), strict=True))
        assert [found[i] for i in range(len(found))] == list(SAMPLES.values())
        missing = volume.members[1].uuid
    b.guest.kill()
    with pytest.raises(dlfs.NotFoundError, match=f"missing: 1 .{missing}") as caught:
        dlfs.open(uris)
    assert f"127.0.0.1:{b.export.discovery_port}" in str(caught.value)
