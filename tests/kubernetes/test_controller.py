"""The controller service, on a scripted nvmf_tgt and, on demand, the kernel's target in a guest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import UsageError
from dlfs.fabric.composing import ComposingTarget, open_target
from dlfs_csi.pools import read_pools, volume_name
from dlfs_csi.wire import Mode, messages
from tests.kubernetes.conftest import SAMPLES
from tests.kubernetes.driving import ROOT, Plant, Refused, capability
from tests.nvmet.guest import free_port
from tests.support.volumes import write_dataset
from tests.support.waiting import wait_for

HOST = "nqn.2024-01.org.example:readers"
NODES = 2


def create(plant: Plant, name: str, size: int = 16 * MIB, *, limit: int = 0, **words: Any) -> Any:
    parameters = {"pool": "fast", **words.pop("parameters", {})}
    capacity = messages.CapacityRange(required_bytes=size, limit_bytes=limit)
    words = {"volume_capabilities": [capability()], **words}
    made = plant.call(
        "CreateVolume", name=name, capacity_range=capacity, parameters=parameters, **words
    )
    return made.volume


class Storage:
    """Storage nodes of a pool, each a scripted nvmf_tgt, and a driver with a controller."""

    def __init__(self, folder: Path, user: str) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        nodes = []
        for number in range(NODES):
            path = folder / f"rpc{number}"
            command = [sys.executable, "-m", "tests.deploy.scripted_nvmf_tgt", "-r", str(path)]
            self.processes.append(subprocess.Popen(command, cwd=ROOT))
            wait_for(path.exists, "the target")
            nodes.append({"target": f"spdk:{path}", "address": "127.0.0.1", "port": free_port()})
        stores = folder / "store"
        stores.mkdir()
        self.pool = {"nodes": nodes, "store": str(stores), "hostNqn": HOST, "defaultSize": "16MiB"}
        # Two storage nodes of one machine cannot have files of one name in a folder.
        single = {**self.pool, "nodes": nodes[:1]}
        pools = folder / "pools.json"
        pools.write_text(json.dumps({"fast": single}))
        self.plant = Plant(user, "--services", "both", "--pools", str(pools))

    def close(self) -> None:
        self.plant.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, user: str) -> Iterator[Storage]:
    pytest.importorskip("spdk.rpc.client", reason="no client (pip install spdk)")
    storage = Storage(tmp_path_factory.mktemp("storage"), user)
    yield storage
    storage.close()


pytestmark = [pytest.mark.root, pytest.mark.fuse]


def live(plant: Plant) -> None:
    """Make a volume, write to it, read it, expand it meanwhile, and delete it."""
    made = create(plant, "pvc-1", parameters={"label": "pool", "mode": "440"})
    assert made == create(plant, "pvc-1", parameters={"label": "pool", "mode": "440"})
    assert (made.volume_id, made.capacity_bytes) == ("fast/pvc-1", 16 * MIB)
    attributes = dict(made.volume_context)
    uri = attributes.pop("volumes")
    assert attributes == {"mode": "440"}
    with pytest.raises(Refused, match="ALREADY_EXISTS"):
        create(plant, "pvc-1", 32 * MIB)
    write_dataset(uri, "animals", SAMPLES)  # as an import does, outside of any mount

    target = plant.targets / "target"
    words = {"volume_id": made.volume_id, "attributes": attributes}
    plant.publish(target, uri, **words)
    assert (target / "animals/cat/0.txt").read_text() == "first"
    for _ in range(2):
        grown = plant.call(
            "ControllerExpandVolume",
            volume_id=made.volume_id,
            capacity_range=messages.CapacityRange(required_bytes=40 * MIB),
        )
        assert (grown.capacity_bytes, grown.node_expansion_required) == (40 * MIB, False)
    with dlfs.open(uri) as volume:
        assert len(volume.info().members) == 2
        assert volume.info().label == "pool"
    assert (target / "animals/dog/1.txt").read_text() == "second"
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").touch()
    plant.call("NodeUnpublishVolume", volume_id=made.volume_id, target_path=str(target))
    for _ in range(2):
        plant.call("DeleteVolume", volume_id=made.volume_id)
    assert plant.left() == []
    assert not plant.call("ListVolumes").entries


def test_a_volume_is_made_written_read_expanded_and_deleted(storage: Storage) -> None:
    live(storage.plant)
    assert list(Path(storage.pool["store"]).iterdir()) == []


@pytest.mark.qemu
@pytest.mark.skipif(not os.environ.get("DLFS_CSI_KERNEL"), reason="takes long: DLFS_CSI_KERNEL=1")
def test_the_same_on_the_target_of_a_real_kernel(
    node: tuple[ComposingTarget, int], tmp_path: Path, user: str
) -> None:
    port = node[1]
    there = {"target": "nvmet+ssh://root@storage-a", "address": "127.0.0.1", "port": port}
    pool = {"nodes": [{**there, "discoveryPort": port}], "store": "/tmp/store", "hostNqn": HOST}
    pools = tmp_path / "pools.json"
    pools.write_text(json.dumps({"fast": pool}))
    plant = Plant(user, "--services", "both", "--pools", str(pools))
    try:
        live(plant)
    finally:
        plant.close()


def test_an_interrupted_expansion_is_continued(storage: Storage) -> None:
    plant = storage.plant
    made = create(plant, "pvc-2")
    pool = read_pools(storage.folder / "pools.json")["fast"]
    from dlfs_csi.pools import Place

    with open_target(pool.nodes[0].target) as target:
        Place("fast", pool, "pvc-2").compose([target], 2, 16 * MIB)
    for required in (20, 40):
        grown = plant.call(
            "ControllerExpandVolume",
            volume_id=made.volume_id,
            capacity_range=messages.CapacityRange(required_bytes=required * MIB),
        )
        assert grown.capacity_bytes == max(32, required) * MIB
    plant.call("DeleteVolume", volume_id=made.volume_id)


def test_volumes_are_listed_and_validated(storage: Storage) -> None:
    plant = storage.plant
    for name in ("a", "b", "c"):
        create(plant, name)
    listed = plant.call("ListVolumes", max_entries=2)
    assert [each.volume.volume_id for each in listed.entries] == ["fast/a", "fast/b"]
    rest = plant.call("ListVolumes", starting_token=listed.next_token)
    assert ([each.volume.volume_id for each in rest.entries], rest.next_token) == (["fast/c"], "")
    for mode, confirmed in ((Mode.MULTI_NODE_READER_ONLY, True), (Mode.SINGLE_NODE_WRITER, False)):
        found = plant.call(
            "ValidateVolumeCapabilities",
            volume_id="fast/a",
            volume_capabilities=[capability(mode)],
        )
        assert found.HasField("confirmed") == confirmed
    for name in ("a", "b", "c"):
        plant.call("DeleteVolume", volume_id=f"fast/{name}")
    assert not plant.call("ListVolumes").entries


def test_wrong_calls_fail_with_their_codes(storage: Storage) -> None:
    plant = storage.plant
    expand = {"capacity_range": messages.CapacityRange(required_bytes=MIB)}
    one = [capability()]
    for method, words, code in (
        ("CreateVolume", {}, "INVALID_ARGUMENT"),
        ("CreateVolume", {"name": "n"}, "INVALID_ARGUMENT"),
        ("DeleteVolume", {}, "INVALID_ARGUMENT"),
        ("ValidateVolumeCapabilities", {}, "INVALID_ARGUMENT"),
        ("ValidateVolumeCapabilities", {"volume_id": "fast/x"}, "INVALID_ARGUMENT"),
        ("ValidateVolumeCapabilities", {"volume_id": "x", "volume_capabilities": one}, "NOT_FOUND"),
        ("ControllerExpandVolume", expand, "INVALID_ARGUMENT"),
        ("ControllerExpandVolume", {"volume_id": "fast/x"}, "INVALID_ARGUMENT"),
        ("ControllerExpandVolume", {"volume_id": "fast/x", **expand}, "NOT_FOUND"),
        ("ListVolumes", {"starting_token": "some-token"}, "ABORTED"),
        ("ListVolumes", {"max_entries": -1}, "INVALID_ARGUMENT"),
    ):
        with pytest.raises(Refused, match=code):
            plant.call(method, **words)
    for words, part in (
        ({"parameters": {"pool": "slow"}}, "expected one of fast"),
        ({"parameters": {"replicas": "2"}}, "at most 1"),
        ({"parameters": {"replicas": "x"}}, "expected 1..4"),
        ({"parameters": {"chunkSize": "3KiB"}}, "power of two"),
        ({"parameters": {"color": "red"}}, "'color'"),
        ({"parameters": {"mode": "777"}}, "'mode'"),
        ({"volume_capabilities": [capability(Mode.SINGLE_NODE_WRITER)]}, "ReadOnlyMany"),
        ({"limit": MIB}, "expected a range"),
    ):
        with pytest.raises(Refused, match=f"INVALID_ARGUMENT: .*{part}"):
            create(plant, "n", **words)
    with pytest.raises(Refused, match="OUT_OF_RANGE"):
        create(plant, "n", MIB + 1, limit=MIB + 2)
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
        create(plant, "n", 1 << 43)
    plant.call("DeleteVolume", volume_id="no-such-volume")


def test_names_and_files_of_pools() -> None:
    assert volume_name("pvc-1") == "pvc-1"
    for odd in ("a" * 128, "a.b", "ä", "-", "a/b"):
        name = volume_name(odd)
        assert volume_name(name) == name
        assert len(name) <= 56
    assert len({volume_name("a" * count) for count in range(60, 70)}) == 10


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "expected JSON"),
        ('{"Fast": {"nodes": [], "store": "/s"}}', "lower-case"),
        ('{"fast": {"nodes": [], "store": "/s"}}', "storage nodes"),
        ('{"fast": {"nodes": [], "stores": "/s"}}', "stores"),
        ('{"fast": {"nodes": [{"target": "nvmet", "address": "x"}], "store": "/s"}}', "address"),
    ],
)
def test_wrong_files_of_pools_are_refused(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "pools.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=part):
        read_pools(path)
