"""Imports by workers into a volume on SPDK's target: equal to those without."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.ingest.workers.addresses import Address
from dlfs.ingest.workers.by_workers import WorkersOptions
from dlfs.ingest.workers.starting import start_workers
from tests.spdk.target import SpdkTarget
from tests.support.files import write_files

pytestmark = pytest.mark.spdk

NQN = "nqn.2024-01.org.dlfs.test:workers"


@pytest.mark.parametrize("initiator", ["spdk", "tcp"])
def test_equal_datasets(spdk_target: SpdkTarget, tmp_path: Path, initiator: str) -> None:
    source = write_files(
        tmp_path / "s", {f"{n % 7}/{n:03}": n.to_bytes(2) * (n * 37 % 4000) for n in range(300)}
    )
    file = str(tmp_path / "join")
    listen = Address("127.0.0.1")
    joining = WorkersOptions(2, start=start_workers(None, listen=listen, join_file=file))
    seen = []
    with spdk_target.subsystem(NQN):
        uri = getattr(spdk_target, f"{initiator}_uri")(NQN)
        dlfs.format_volume(uri, chunk_bytes=16 * KIB)
        command = [sys.executable, "-m", "dlfs.cli", "import-worker", file]
        with subprocess.Popen(command) as first, subprocess.Popen(command) as second:
            for name, workers in (("plain", 0), ("processes", 2), ("joined", joining)):
                with dlfs.open(uri) as volume, closing(open_source(source)) as opened:
                    report = import_dataset(
                        volume, opened, name, step_bytes=64 * KIB, workers=workers
                    )
                seen.append((report.dataset.content_digest, report.dataset.packing_digest))
            assert (first.wait(), second.wait()) == (0, 0)
    assert len(set(seen)) == 1
