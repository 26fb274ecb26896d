"""``dlfs://`` through a service."""

from __future__ import annotations

import pickle

import fsspec


def test_files_of_a_service(serve, volume, samples) -> None:
    service = serve(volume)
    files = fsspec.filesystem("dlfs", volume=service.uri)
    found = files.find("d")
    assert found == sorted(f"d/{path.decode()}" for path in samples)
    assert files.cat(found) == {f"d/{path.decode()}": data for path, data in samples.items()}
    path, data = max(samples.items(), key=lambda item: len(item[1]))
    again = pickle.loads(pickle.dumps(files))
    assert again.cat_file(f"d/{path.decode()}", 100, 200) == data[100:200]
    with fsspec.open(f"dlfs://{service.uri}!/d/{path.decode()}") as file:
        assert file.read() == data
