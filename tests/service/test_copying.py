"""A service is the source of a copy, and of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dlfs
from tests.service.serving import Service, make_volume


def test_a_dataset_is_copied_from_a_service(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes], tmp_path: Path
) -> None:
    target = make_volume(tmp_path / "target.img", {b"x": b"other"}, name="other")
    service = serve(volume)
    with (
        dlfs.connect(service.uri) as served,
        served["d"] as original,
        dlfs.open(target) as written,
    ):
        dlfs.copy_dataset(original, written)
        assert served.usage().sample_bytes == sum(map(len, samples.values()))
        with written["d"] as copy:
            assert copy[:].to_list() == list(samples.values())
            assert not dlfs.diff(original, copy)
            assert copy.column("name", [0]).tolist() == [copy.path(0).decode()[::-1]]


def test_clients_of_a_renamed_dataset_read_on(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    service = serve(volume)
    with dlfs.connect(service.uri) as served, served["d"] as before, dlfs.open(volume) as opened:
        epoch = iter(before.batches(100, seed=1))
        first = len(next(epoch))
        opened.rename("d", "e")
        served.refresh()
        assert [info.name for info in served.datasets()] == ["e"]
        assert first + sum(len(batch) for batch in epoch) == len(samples)
        with served["e"] as after:
            assert after[:].to_list() == list(samples.values())
