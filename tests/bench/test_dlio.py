"""DLIO beside DLFS: all of it at a tiny size where DLIO is installed, its parts everywhere."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pytest
from PIL import Image
from tfrecord.writer import TFRecordWriter

import dlfs
from bench.dlio.__main__ import choose, main, parse_arguments, run
from bench.dlio.feed import DECODERS, Feed, training_samples
from bench.dlio.report import Race, Results, make_report
from bench.dlio.run import Epoch, read_results
from bench.dlio.stage import PROGRAMS, Stage, compare, find_dlio, same_records, serve
from bench.dlio.workloads import WAYS, WORKLOADS, Workload
from bench.errors import Unavailable, WrongBytesError
from bench.progress import Progress
from dlfs.base.units import MIB

TINY = [load for load in WORKLOADS if load.name in ("resnet50-tfrecord", "unet3d-npz")]


# ---- DLIO itself ---------------------------------------------------------------------------------


@pytest.fixture
def dlio() -> Path:
    try:
        return find_dlio()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.fuse
@pytest.mark.timeout(600)
@pytest.mark.parametrize("load", TINY, ids=lambda load: load.name)
def test_dlio_trains_unchanged_in_every_way(
    dlio: Path, load: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(
        load,
        samples_per_file=min(load.samples_per_file, 4),
        record_bytes=load.record_bytes // 8,
        batch_size=min(load.batch_size, 4),
        options={**load.options, "dataset.record_length_stdev": 0},
    )
    monkeypatch.setattr("bench.dlio.__main__.WORKLOADS", (tiny,))
    words = ["--dir", str(tmp_path), "--files", "12", "--rounds", "1"]
    arguments = parse_arguments([*words, "--results", str(tmp_path / "results")])

    (race,) = run(arguments, Progress().whole())

    assert set(race.runs) == set(WAYS)
    for way in WAYS:
        (once,) = race.runs[way]
        assert len(once["epochs"]) == 2
        assert all(
            0 < epoch["utilisation"] <= 100 and epoch["rate"] > 0 for epoch in once["epochs"]
        )
    assert race.runs["plugin"][0]["service_cpu_seconds"] > 0
    assert not (tmp_path / "dlio").exists()


# ---- the plug-in's feed --------------------------------------------------------------------------


def samples_of(kind: str, count: int) -> list[bytes]:
    """Samples as DLIO's generators make them."""
    made = []
    for number in range(count):
        pixels = np.full((8, 8), number, np.uint8)
        file = io.BytesIO()
        if kind == "jpeg":
            Image.fromarray(pixels).save(file, format="JPEG")
        else:
            np.savez(file, x=pixels, y=[0])
        made.append(file.getvalue())
    return made


def write_dataset(path: Path, samples: dict[str, bytes]) -> None:
    dlfs.format_volume(str(path), size_bytes=16 * MIB)
    with dlfs.open(str(path)) as volume, volume.writer("d") as writer:
        for name, data in samples.items():
            writer.add(name, data)


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[dlfs.Dataset]:
    samples = {f"train/{number:02}": bytes([number]) for number in range(30)}
    samples |= {f"{other}/{number}": b"no" for other in ("index", "valid") for number in range(3)}
    write_dataset(tmp_path / "volume.img", samples)
    with dlfs.open(str(tmp_path / "volume.img")) as volume, volume["d"] as opened:
        yield opened


def test_an_epoch_decodes_each_training_sample_once_in_its_own_order(
    dataset: dlfs.Dataset,
) -> None:
    seen: list[int] = []

    def decode(samples: Sequence[memoryview]) -> None:
        seen.extend(sample[0] for sample in samples)

    feed = Feed(dataset, 5, decode, seed=3, threads=1, lookahead=2)
    orders = []
    for number in (1, 2, 1):
        assert list(feed.epoch(number)) == [5] * 6
        orders.append(list(seen))
        seen.clear()
    feed.close()

    assert sorted(orders[0]) == list(range(30))
    assert orders[0] == orders[2] != orders[1]


def test_ranks_share_an_epoch_and_threads_a_batch(dataset: dlfs.Dataset) -> None:
    parts: list[bytes] = []
    for rank in range(2):
        feed = Feed(
            dataset,
            5,
            lambda samples: parts.append(b"".join(samples)),
            rank=rank,
            world_size=2,
            threads=2,
        )
        assert list(feed.epoch(1)) == [5] * 3
        feed.close()
    assert sorted(b"".join(parts)) == list(range(30))
    assert {len(part) for part in parts} == {2, 3}


def test_an_epoch_that_is_left_early_leaves_nothing_behind(dataset: dlfs.Dataset) -> None:
    feed = Feed(dataset, 4, lambda samples: None, lookahead=3)
    epoch = feed.epoch(1)
    assert next(epoch) == 4
    epoch.close()
    assert len(list(feed.epoch(2))) == 7
    feed.close()


def test_what_a_decoder_raises_ends_the_epoch(dataset: dlfs.Dataset) -> None:
    def decode(samples: Sequence[memoryview]) -> None:
        raise ValueError(f"{len(samples)} samples")

    feed = Feed(dataset, 4, decode, threads=1)
    with pytest.raises(ValueError, match="4 samples"):
        list(feed.epoch(1))
    feed.close()


@pytest.mark.parametrize("kind", ["jpeg", "npz"])
def test_samples_are_decoded_as_dlio_would(kind: str) -> None:
    samples = [memoryview(sample) for sample in samples_of(kind, 3)]
    DECODERS[kind](samples)
    with pytest.raises((OSError, BadZipFile)):
        DECODERS[kind]([memoryview(bytes(samples[0])[:40])])


def test_a_dataset_of_records_is_trained_on_as_a_whole(tmp_path: Path) -> None:
    write_dataset(tmp_path / "volume.img", {f"0000{number}": b"x" for number in range(4)})
    with dlfs.open(str(tmp_path / "volume.img")) as volume, volume["d"] as opened:
        assert training_samples(opened) is None


# ---- comparing what DLIO generated ---------------------------------------------------------------


def write_records(path: Path, values: Sequence[bytes], *, turned: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = TFRecordWriter(str(path))
    for value in values:
        datum = {"image": (value, "byte"), "size": (len(value), "int")}
        writer.write(dict(reversed(datum.items())) if turned else datum)
    writer.close()


def test_records_are_the_same_whatever_the_order_of_their_features(tmp_path: Path) -> None:
    one, other, third, short = (tmp_path / f"{name}.tfrecord" for name in "abcd")
    write_records(one, [b"cat", b"dog"])
    write_records(other, [b"cat", b"dog"], turned=True)
    write_records(third, [b"cat", b"fox"])
    write_records(short, [b"cat"])
    assert same_records(one, other)
    assert not same_records(one, third)
    assert not same_records(one, short)
    assert not same_records(short, one)


def test_folders_that_differ_are_told(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for root in (one, other):
        write_records(root / "train" / "a.tfrecord", [b"cat"])
        (root / "valid").mkdir()
        (root / "valid" / "b.npz").write_bytes(b"1234")
    assert compare(one, other) == 2
    (other / "valid" / "b.npz").write_bytes(b"1235")
    with pytest.raises(WrongBytesError, match=r"b\.npz has other bytes"):
        compare(one, other)
    (one / "valid" / "c.npz").touch()
    with pytest.raises(WrongBytesError, match=r"c\.npz is in .*one only"):
        compare(one, other)


def test_the_index_of_a_tfrecord_file(tmp_path: Path) -> None:
    records, index = tmp_path / "a.tfrecord", tmp_path / "a.idx"
    write_records(records, [b"cat", b"lion"])
    command = [sys.executable, str(PROGRAMS / "tfrecord2idx"), str(records), str(index)]
    subprocess.run(command, check=True)
    spans = [tuple(map(int, line.split())) for line in index.read_text().splitlines()]
    assert [offset for offset, _ in spans] == [0, spans[0][1]]
    assert sum(length for _, length in spans) == records.stat().st_size
    records.write_bytes(records.read_bytes()[:-1])
    cut = subprocess.run(command, check=False, capture_output=True, text=True)
    assert cut.returncode == 1
    assert f"the record at {spans[1][0]} bytes ends behind" in cut.stderr


def test_a_service_that_does_not_start_is_told(tmp_path: Path) -> None:
    stage = Stage(WORKLOADS[0], tmp_path, 1)
    with pytest.raises(Unavailable, match=r"ended with \d+; see .*serve\.log"), serve(stage):
        pass
    assert "volume.img" in (tmp_path / "serve.log").read_text()


# ---- figures and tables --------------------------------------------------------------------------


def write_results(folder: Path, *, steps: object) -> None:
    metric = {
        "train_au_percentage": [50.0, 90.0],
        "train_throughput_samples_per_second": [100.0, 180.0],
    }
    (folder / "summary.json").write_text(json.dumps({"metric": metric}))
    (folder / "0_output.json").write_text(json.dumps(steps))


def test_dlio_is_read_by_epoch(tmp_path: Path) -> None:
    steps = {str(number): {"load": {"block1": [0.5 / number, 0.1]}} for number in (1, 2)}
    write_results(tmp_path, steps=steps)
    assert read_results(tmp_path) == [Epoch(50.0, 100.0, 0.5), Epoch(90.0, 180.0, 0.25)]
    write_results(tmp_path, steps={"1": {}})
    with pytest.raises(ValueError, match="read DLIO's results in"):
        read_results(tmp_path)


def made_race() -> Race:
    def once(*utilisation: float) -> Results:
        epochs = [
            {"utilisation": value, "rate": 2 * value, "first_seconds": 0.1} for value in utilisation
        ]
        return {"cold": True, "epochs": epochs, "service_cpu_seconds": 0.0}

    runs = {
        "ext4": [once(50, 90), once(60, 90), once(40, 91)],
        "mount": [once(50.5, 90), once(59, 90), once(41, 90)],
        "plugin": [once(75, 90), once(75, 95), once(80, 90)],
    }
    return Race(WORKLOADS[0], 8, 2 * MIB, runs)


def test_ways_are_compared_within_rounds() -> None:
    race = made_race()
    assert race.over_ext4("plugin", 0) == (25, 1.5)
    assert (race.verdict("mount"), race.verdict("plugin")) == ("the same", "higher")
    race.runs["mount"] = [
        {**run, "epochs": [{**epoch, "utilisation": 1.0} for epoch in run["epochs"]]}
        for run in race.runs["mount"]
    ]
    assert race.verdict("mount") == "lower"


def test_a_report_has_every_run_and_a_table(tmp_path: Path) -> None:
    facts = {"date": "2026-01-02T03:04:05+00:00", "commit": "c0ffee"}
    path = make_report(facts, {"rounds": "3"}, [made_race()]).write(tmp_path)
    (workload,) = json.loads(path.read_text())["workloads"]
    assert len(workload["runs"]["mount"]) == 3
    assert workload["verdicts"] == {"mount": "the same", "plugin": "higher"}
    table = path.with_suffix(".md").read_text()
    assert "| plugin | 1, cold | 75.0 | 75.0 - 80.0 | +25.0 | 150 | 1.50 | 0.10 |" in table
    assert "commit c0ffee" in table
    assert "mount: the same, plugin: higher" in table


def test_options_say_all_that_dlio_is_to_do(tmp_path: Path) -> None:
    for load in WORKLOADS:
        words = load.options_of(tmp_path / "data", tmp_path / "out", files=7, ranks=2, seed=5)
        assert words[0] == f"workload={load.base}"
        assert f"++workload.dataset.data_folder={tmp_path}/data" in words
        evaluated = f"++workload.dataset.num_files_eval={2 * load.threads}"
        assert {"++workload.train.seed=5", evaluated} <= set(words)
    stage = Stage(WORKLOADS[0], tmp_path, 7)
    assert stage.dataset == "resnet50-tfrecord-records"
    stage.stamp.write_text(json.dumps(stage.described()))
    assert Stage.load(tmp_path) == stage


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_arguments(["--prefix", "nice -n 5"]).prefix == ["nice", "-n", "5"]
    assert [load.name for load in choose(["*npz", "none"])] == ["unet3d-npz"]
    monkeypatch.setattr("sys.argv", ["bench.dlio", "--list"])
    assert main() == 0
    monkeypatch.setattr("sys.argv", ["bench.dlio", "--workloads", "none"])
    assert main() == 2
    monkeypatch.setattr("sys.argv", ["bench.dlio", "--dir", str(tmp_path)])
    monkeypatch.setattr("bench.dlio.stage.ENVIRONMENT", tmp_path)
    assert main() == 1
    said = capsys.readouterr().out
    assert "unet3d-npz" in said
    assert "see --list" in said
    assert "make bench-dlio" in said
