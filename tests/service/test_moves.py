"""Clients of a service read on while their dataset is moved to other members."""

from __future__ import annotations

from pathlib import Path

import dlfs
from dlfs.units import MIB
from tests.service.serving import Service, make_samples, make_volume
from tests.unit.resizing.test_following import overwrite


def test_clients_follow_a_dataset_that_is_moved(tmp_path: Path) -> None:
    samples = make_samples(200)
    old = make_volume(tmp_path / "old.img", samples)
    new = str(tmp_path / "new.img")
    service = Service([old], tmp_path / "m.sock", "--cache", "16MiB")
    service.wait_ready()
    try:
        with dlfs.connect(service.uri) as volume, volume["d"] as dataset, volume["d"] as other:
            paths = dataset.paths()
            expected = list(samples.values())
            batches = dataset.batches(16, seed=3)
            seen = []
            for number, batch in enumerate(batches):
                with batch:
                    assert batch.to_list() == [expected[i] for i in batch.indices]
                    seen += batch.indices.tolist()
                if number == 2:
                    with dlfs.open(old) as writer:
                        writer.grow(new, size_bytes=16 * MIB)
                        writer.shrink([0])
                    overwrite(old)
            assert sorted(seen) == list(range(len(expected)))
            with other.read(range(len(expected))) as batch:
                assert batch.to_list() == expected
            assert other.get(paths[-1]) == expected[-1]
        with dlfs.connect(service.uri) as volume:
            assert volume.info().uri == new
    finally:
        service.stop()
        service.close()
