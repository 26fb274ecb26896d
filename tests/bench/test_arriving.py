"""The benchmark of training from a bucket, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.arriving.bucket import bucket, shard_urls
from bench.arriving.parts import PARTS, Job, train
from bench.errors import WrongBytesError
from bench.process import ROOT

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")


def test_every_part_reports_or_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.arriving", "--dir", str(tmp_path)]
    command += ["--samples", "100", "--size", "2000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = {line["part"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(found) == list(PARTS)
    for part, line in found.items():
        is_import = part.endswith("alone")
        assert line.keys() - {"part"} == (
            {"import samples/s"}
            if is_import
            else {"left out"}
            if "left out" in line
            else {"first batch s", "first epoch samples/s", "second epoch samples/s"}
        )
    assert "left out" not in found["DLFS: import of objects alone"]
    assert list(tmp_path.iterdir()) == []


def test_missing_samples_are_noticed() -> None:
    job = Job("x", "", "", [], 2, 10)
    with pytest.raises(WrongBytesError, match="1 samples in the first epoch"):
        train(job, lambda _epoch: [[b"00000000ab"]])
    with pytest.raises(WrongBytesError, match="a sample of 9 bytes"):
        train(job, lambda _epoch: [[b"00000000a"]])


def test_the_bucket_has_the_samples_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    with bucket(20, 100) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        files = s3fs.S3FileSystem()
        assert len(files.find("s3://bucket/files")) == 20
        assert files.find("s3://bucket/shards") == [
            url.removeprefix("s3://") for url in shard_urls()
        ]
        s3fs.S3FileSystem.clear_instance_cache()
