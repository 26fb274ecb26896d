"""Import: from a folder of files to a sealed dataset."""

from __future__ import annotations

from dataclasses import dataclass

import dlfs
from bench.contestant import (
    CHECKED,
    Ground,
    Sample,
    check_bytes,
    drop_caches_for,
    timed,
)
from bench.datasets import DATASET, Scene, volume_bytes
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.source import Layout


@dataclass(frozen=True)
class Import:
    """A folder into a new volume, with cold caches: walk, read, pack, write, seal, flushed.

    Attributes:
        layout: order of packing.
    """

    layout: Layout

    @property
    def label(self) -> str:
        """In tables."""
        return f"DLFS import of a folder, cold, layout {self.layout}"

    def run(self, ground: Ground) -> Sample:
        """All files once."""
        scene = ground.scene
        target = scene.folder / "imported.img"
        total = int(scene.source.lengths[scene.file_indices].sum())
        size_bytes = volume_bytes(len(scene.file_indices), total)
        dlfs.format_volume(str(target), size_bytes=size_bytes, force=True)
        drop_caches_for(ground.machine, cold=True)
        try:
            with dlfs.open(str(target)) as volume:
                with timed() as watch:
                    source = FolderSource(scene.files, links="skip")
                    report = import_dataset(volume, source, DATASET, layout=self.layout)
                source.close()
                checked = _check(volume, scene)
        finally:
            target.unlink()
        return Sample(
            report.sample_count,
            report.sample_bytes,
            watch.seconds,
            watch.cpu_seconds,
            checked,
            {"walk_seconds": watch.seconds - report.seconds},
        )


def _check(volume: dlfs.Volume, scene: Scene) -> int:
    chosen = scene.file_order(0)[:CHECKED].tolist()
    with volume.dataset(DATASET) as dataset:
        return check_bytes(scene, {i: dataset.get(scene.source.path(i)) for i in chosen})
