"""The GPU benchmark: a tiny run of all of it without a GPU, and feeds that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.errors import Unavailable, WrongBytesError
from bench.gpu import __main__ as gpu
from bench.gpu import feeds
from bench.gpu.feeds import FEEDS, Feed
from bench.gpu.measuring import SIZES, _check, source_of
from dlfs.base.units import MIB

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def run(folder: Path, *words: str) -> tuple[int, list[Path]]:
    code = gpu.main(["--dir", str(folder / "data"), "--results", str(folder / "results"), *words])
    return code, sorted((folder / "results").glob("gpu-*"))


def test_all_of_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--device", "cpu", "--sizes", "4k", "--size", "1MiB", "--seconds", "0.05")
    code, (data, page) = run(tmp_path, *words, "--only", "dlfs-locked")
    assert code == 0
    found: dict[str, Any] = json.loads(data.read_text())
    assert not found["missing"]
    (result,) = found["results"]["dlfs-locked"]
    assert result["size"] == "4k"
    assert result["samples_per_s"] > 0
    assert result["cpu_us_per_sample"] > 0
    assert result["steps"] > 0
    assert 0 <= result["waited_share"] <= 1
    assert "none: the processor in its place" in page.read_text()
    assert "## Samples of 4.0 KiB, batches of 256" in capsys.readouterr().out
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("feed", FEEDS, ids=lambda feed: feed.name)
def test_a_feed_gives_whole_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feed: Feed
) -> None:
    monkeypatch.setattr(feeds, "WORKERS_MAX", 1)
    source = source_of(SIZES[0], MIB, seed=1)
    try:
        feed.prepare(source, tmp_path)
        with feed.open(tmp_path, 100, "cpu") as epochs:
            for _ in range(2):
                batches = list(epochs())
                rows = torch.cat(batches)
                numbers = rows[:, :8].contiguous().view(torch.int64).flatten()
                assert sorted(numbers.tolist()) == list(range(len(source)))
                assert numbers.tolist() != sorted(numbers.tolist())
                _check(source, batches[0])
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, files = run(tmp_path)
    assert code == 1
    assert not files
    text = " ".join(capsys.readouterr().out.split())
    assert "python -m bench gpu needs a GPU" in text
    assert "--device cpu runs everything without one" in text


def test_a_feed_that_fails_leaves_the_other_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MODULE", "tests.bench.gpu_child")
    code, (data, page) = run(tmp_path, "--only", "dlfs-locked", "--only", "mds")
    assert code == 1
    found = json.loads(data.read_text())
    assert [one["size"] for one in found["results"]["dlfs-locked"]] == ["110k", "1m"]
    reason = "it failed: the last words of the driver"
    assert found["missing"]["dlfs-locked"] == {"4k": reason}
    assert found["missing"]["mds"] == dict.fromkeys(["4k", "110k", "1m"], "streaming is missing")
    assert found["logs"] == {"dlfs-locked": "the last words of the driver\n"}
    assert f"| dlfs-locked | - | - | - | - | - | - | {reason} |" in page.read_text()
    assert "| dlfs-locked | 1,000 | 1,000 | 2.50 | 25.0% | 1.00 | - |  |" in page.read_text()


def test_time_that_is_over_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MODULE", "tests.bench.gpu_child")
    _, (data, _) = run(tmp_path, "--minutes", "0.1", "--only", "dlfs-*")
    found = json.loads(data.read_text())
    assert set(found["missing"]["dlfs-staged"].values()) == {"no time was left"}


@pytest.mark.parametrize("words", [("--sizes", "5k"), ("--only", "nothing")])
def test_wrong_arguments_are_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    assert run(tmp_path, *words) == (2, [])


def test_samples_are_images_and_wrong_bytes_are_noticed() -> None:
    for size in SIZES:
        assert size.height * size.width == size.length
    source = source_of(SIZES[0], MIB, seed=1)
    rows = np.stack([np.frombuffer(source.data(i), np.uint8) for i in (5, 9)])
    _check(source, torch.from_numpy(rows))
    rows[1, 100] ^= 1
    with pytest.raises(WrongBytesError, match="index 9"):
        _check(source, torch.from_numpy(rows))
