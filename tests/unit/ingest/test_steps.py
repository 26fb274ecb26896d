"""Imports in steps go on after a kill with the same result, and let others write meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset import committed_steps, step_cutter
from dlfs.errors import (
    ChecksumError,
    ExistsError,
    NotFoundError,
    SpaceError,
    StaleError,
    UsageError,
)
from dlfs.format.geometry import DataSpace
from dlfs.ingest.attributes import AttributedSource, PathRule, Rule, TableRule, label_rule
from dlfs.ingest.importer import ImportReport, import_dataset, open_source
from dlfs.ingest.source import SampleBlock, Source, array_attributes
from tests.support.files import flip_bit
from tests.support.volumes import new_volume, read_dataset, write_dataset

STEP_BYTES = 200 * KIB
FILES = 120

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


class Killed(Exception):
    """Stands for a kill: nothing of the import's own runs after it but what undoes its step."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


def folder(place: Path) -> Path:
    chance = random.Random(1)
    for number in range(FILES):
        file = place / "folder" / "ab"[number % 2] / f"{number:03}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(chance.randbytes(chance.choice([0, 10, 5000, 9000, 40000])))
    (place / "folder" / "empty").mkdir()
    return place / "folder"


def parquet(place: Path) -> Path:
    chance = random.Random(2)
    images = [chance.randbytes(chance.choice([0, 3000, 20000])) for _ in range(FILES)]
    columns = {
        "image": images,
        "label": list(range(FILES)),
        "text": [f"t{n % 7}" for n in range(FILES)],
    }
    pq.write_table(pa.table(columns), place / "x.parquet", row_group_size=25)
    return place / "x.parquet"


def jpegs(place: Path) -> Path:
    """Make a tar archive, whose samples have classes."""
    import tarfile

    with tarfile.open(place / "x.tar", "w") as archive:
        archive.add(folder(place), ".")
    return place / "x.tar"


SOURCES = {"folder": folder, "parquet": parquet, "tar": jpegs}


def opened(path: Path, *, labels: bool = False) -> Source:
    source = open_source(path)
    source.buffer_bytes = 64 * KIB
    if not labels:
        return source
    made = AttributedSource(source, [label_rule(), PathRule.parse("number:int=([0-9]+)$")])
    made.buffer_bytes = 64 * KIB
    return made


def run(
    volume: str, source: Source, *, kill_at: int | None = None, **options: Any
) -> ImportReport | None:
    """Import in steps; be killed when so many blocks were added."""
    calls = 0

    def count(_progress: object) -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            raise Killed

    try:
        with dlfs.open(volume) as target:
            options = {"step_bytes": STEP_BYTES, "seed": 3, **options}
            return import_dataset(target, source, "x", progress=count, **options)
    except Killed:
        return None
    finally:
        source.close()


def everything(volume: str, name: str = "x") -> tuple[Any, ...]:
    """Return all that an import decides: paths, places, checksums, attributes, directories."""
    with dlfs.open(volume) as target, target[name] as dataset:
        directory = dataset.session.directory
        columns = {key: dataset.column(key).tolist() for key in dataset.columns}
        assert list(target.verify()) == []
        return (
            directory.names(),
            directory.addresses().tolist(),
            directory.lengths().tolist(),
            directory.crcs().tolist(),
            directory.parts.tolist(),
            directory.empty_directories(),
            columns,
            dataset.fields,
            dataset.info.layout,
            dataset.info.seed,
        )


def fresh(path: Path, **layout: Any) -> str:
    return str(new_volume(path, size_bytes=32 * MIB, chunk_bytes=16 * KIB, **layout))


@pytest.mark.parametrize("layout", ["shuffled", "path"])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_killed_import_goes_on_to_the_same_dataset(
    tmp_path: Path, kind: str, layout: str
) -> None:
    path, labels = SOURCES[kind](tmp_path), kind != "parquet"
    whole, killed = fresh(tmp_path / "whole.img"), fresh(tmp_path / "killed.img")
    report = run(whole, opened(path, labels=labels), layout=layout)
    assert report is not None
    kept = []
    for kill_at in range(2, 40):
        found = run(killed, opened(path, labels=labels), layout=layout, kill_at=kill_at)
        with dlfs.open(killed) as volume:
            assert [info.name for info in volume.datasets()] == (["x"] if found else [])
            kept += [info.sample_count for info in volume.unfinished()]
        if found:
            break
    assert found is not None
    assert kept == sorted(kept)
    assert 1 < len(set(kept)) <= len(kept)
    assert found.kept_count == kept[-1]
    assert found.kept_count + found.sample_count == report.sample_count
    assert everything(killed) == everything(whole)
    with dlfs.open(killed) as first, dlfs.open(whole) as second:
        assert first.usage().stored_bytes == second.usage().stored_bytes
        assert first.usage().unfinished_bytes == 0
        assert first.usage().free_bytes == second.usage().free_bytes


def test_steps_make_the_dataset_that_one_step_makes(tmp_path: Path) -> None:
    path = folder(tmp_path)
    steps, one = fresh(tmp_path / "steps.img"), fresh(tmp_path / "one.img")
    run(steps, opened(path, labels=True), layout="path")
    run(one, opened(path, labels=True), layout="path", step_bytes=None)
    found, expected = everything(steps), everything(one)
    assert found[0] == expected[0]
    assert found[2:4] == expected[2:4]
    assert found[5:] == expected[5:]


def test_files_of_earlier_steps_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlfs.ingest import files

    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    read = files.read_files
    counts: list[int] = []

    def counted(directory: int, names: Any, chosen: Any, *rest: Any, **named: Any) -> int:
        counts.append(len(chosen))
        return read(directory, names, chosen, *rest, **named)

    monkeypatch.setattr(files, "read_files", counted)
    run(volume, opened(path), kill_at=8)
    with dlfs.open(volume) as target:
        (unfinished,) = target.unfinished()
    assert 0 < unfinished.sample_count < FILES
    counts.clear()
    assert run(volume, opened(path)) is not None
    assert sum(counts) == FILES - unfinished.sample_count


def test_others_write_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    written: list[str] = []

    def pause() -> None:
        name = f"checkpoint-{len(written)}"
        with dlfs.open(volume) as other:
            write_dataset(other, name, {"weights": bytes([len(written)]) * 30_000})
            if len(written) % 2:
                other.remove(written[-1])
        written.append(name)

    monkeypatch.setattr(committed_steps, "let_others_lock", pause)
    assert run(volume, opened(path)) is not None
    assert len(written) > 3
    whole = fresh(tmp_path / "whole.img")
    monkeypatch.undo()
    run(whole, opened(path))
    assert everything(volume) == everything(whole)
    with dlfs.open(volume) as target:
        last = {info.name for info in target.datasets()} - {"x"}
        for name in last:
            number = int(name.rpartition("-")[2])
            assert read_dataset(target, name) == {b"weights": bytes([number]) * 30_000}


def test_an_import_that_another_one_went_on_with_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    others: list[object] = []

    def pause() -> None:
        monkeypatch.setattr(committed_steps, "let_others_lock", lambda: None)
        others.append(run(volume, opened(path)))

    monkeypatch.setattr(committed_steps, "let_others_lock", pause)
    with pytest.raises(StaleError, match="it is gone"):
        run(volume, opened(path))
    assert others[0] is not None
    with dlfs.open(volume) as target:
        assert target.unfinished() == []
        assert [info.version for info in target.versions("x")] == [1]


def test_an_unfinished_import_is_listed_and_abandoned(tmp_path: Path) -> None:
    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    with dlfs.open(volume) as target:
        before = target.usage().free_bytes
    run(volume, opened(path), kill_at=8, command={"arguments": ["folder", "v.img"]})
    with dlfs.open(volume) as target:
        (info,) = target.unfinished()
        assert (info.name, info.origin["source"]) == ("x", str(path))
        assert info.origin["command"] == {"arguments": ["folder", "v.img"]}
        assert target.usage().unfinished_bytes == info.stored_bytes > info.sample_bytes
        assert "x" not in target
        with pytest.raises(NotFoundError):
            target["x"]
        assert target.abandon("x") == info
        assert target.unfinished() == []
        assert target.usage().free_bytes == before
        with pytest.raises(NotFoundError, match="no unfinished import"):
            target.abandon("x")


def test_a_changed_source_is_refused(tmp_path: Path) -> None:
    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    run(volume, opened(path), kill_at=8)
    for change in ({"seed": 4}, {"layout": "path"}):
        with pytest.raises(UsageError, match="its source, or options of it, are not those of now"):
            run(volume, opened(path), **change)
    (path / "a" / "000").write_bytes(b"other bytes")
    with pytest.raises(UsageError, match=r"unfinished import of .*folder with .* KiB"):
        run(volume, opened(path))


def test_a_path_in_two_steps_is_refused_at_the_seal(tmp_path: Path) -> None:
    volume = fresh(tmp_path / "v.img")
    offsets, lengths = np.arange(4) * 60_000, np.full(4, 60_000)
    for paths, what in (
        ([b"a", b"b", b"c", b"a"], "'a': it was added already"),
        ([b"a", b"b", b"c", b"a/d"], "'a' is a sample"),
    ):
        with dlfs.open(volume) as target:
            writer = target.step_writer(
                "x", {"fingerprint": what}, step_bytes=100_000, layout="path"
            )
            with pytest.raises(ExistsError, match=what), writer:
                writer.add_batch(paths, bytes(240_000), offsets, lengths)
            target.refresh()
            target.abandon("x")


def test_a_full_volume_ends_a_step_and_not_the_seal(tmp_path: Path) -> None:
    offsets, lengths = np.arange(500) * 100, np.full(500, 100)
    outcomes = []
    for size_bytes in range(3 * MIB, 4 * MIB, 256 * KIB):
        path = tmp_path / f"{size_bytes}.img"
        dlfs.format_volume(path, size_bytes=size_bytes, chunk_bytes=16 * KIB)
        with dlfs.open(path) as target:
            free_bytes = target.usage().free_bytes
            writer = target.step_writer("x", {}, step_bytes=200_000, layout="path")
            try:
                for step in range(16):
                    paths = [b"%d/%09d-%s" % (step, i, b"y" * 30) for i in range(500)]
                    texts = [f"text {step * 500 + i}" for i in range(500)]
                    columns = {"number": np.arange(500.0), "text": np.array(texts, object)}
                    writer.add_batch(paths, bytes(50_000), offsets, lengths, attributes=columns)
            except dlfs.SpaceError:
                writer.abort()
                outcomes.append("full")
                target.abandon("x")
                assert target.usage().free_bytes == free_bytes
            else:
                writer.seal()
                outcomes.append("sealed")
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {"full", "sealed"}


def test_attributes_keep_their_types_over_steps(tmp_path: Path) -> None:
    volume = fresh(tmp_path / "v.img")
    offsets, lengths = np.array([0, 60_000]), np.full(2, 60_000)

    def add(writer: dlfs.dataset.step_writer.StepWriter, first: int, **columns: Any) -> None:
        paths = [b"%d" % number for number in range(first, first + 2)]
        writer.add_batch(paths, bytes(120_000), offsets, lengths, attributes=columns)

    with dlfs.open(volume) as target:
        options: dict[str, Any] = {"step_bytes": 100_000, "layout": "path"}
        with target.step_writer("x", {"fingerprint": 1}, **options) as writer:
            add(writer, 0, number=np.array([1, 2], np.int16), box=np.ones((2, 4), np.float32))
            with pytest.raises(UsageError, match="number"):
                add(writer, 2, number=np.array([1, 70_000]), box=np.ones((2, 4)))
            with pytest.raises(UsageError, match="expected the attributes of the samples before"):
                add(writer, 2, number=np.array([1, 2]))
            add(writer, 4, number=np.array([5, 6]), box=np.zeros((2, 4)))
        with target["x"] as dataset:
            assert dataset.column("number").dtype == np.int16
            assert dataset.column("number").tolist() == [1, 2, 5, 6]
            assert dataset.column("box").shape == (4, 4)


@pytest.mark.parametrize("make", [folder, parquet], ids=["folder", "parquet"])
def test_an_import_without_steps_leaves_nothing(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path, volume = make(tmp_path), fresh(tmp_path / "v.img")
    run(volume, opened(path), kill_at=4, step_bytes=None)
    with dlfs.open(volume) as target:
        assert target.unfinished() == []
        assert target.usage().unfinished_bytes == 0


def test_moved_journals_are_found(tmp_path: Path) -> None:
    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    whole = fresh(tmp_path / "whole.img")
    run(whole, opened(path))
    run(volume, opened(path), kill_at=8)
    members = [volume, str(tmp_path / "w.img")]
    with dlfs.open(volume) as target:
        target.grow([members[1]], size_bytes=32 * MIB)
    with dlfs.open(members) as target:
        target.rebalance()
    with dlfs.open(members) as target:
        assert len(target.unfinished()) == 1
        source = opened(path)
        import_dataset(target, source, "x", step_bytes=STEP_BYTES, seed=3)
        source.close()
        found, expected = everything(",".join(members)), everything(whole)
        assert found[:4] == expected[:4]


def test_reserved_columns_may_begin_in_a_later_step(tmp_path: Path) -> None:
    offsets, lengths = np.array([0, 60_000]), np.full(2, 60_000)
    arrays = array_attributes("u1", (60_000,), 2)
    with dlfs.open(fresh(tmp_path / "v.img")) as target:
        options: dict[str, Any] = {"step_bytes": 100_000, "layout": "path"}
        with target.step_writer("x", {}, **options) as writer:
            for paths, columns in (([b"a", b"b"], {}), ([b"c", b"d"], arrays), ([b"e", b"f"], {})):
                writer.add_batch(paths, bytes(120_000), offsets, lengths, attributes=columns)
        with target["x"] as dataset:
            assert dataset.column("dlfs:dtype").tolist() == ["", "", "|u1", "|u1", "", ""]


def test_attributes_are_what_a_writer_without_steps_takes(tmp_path: Path) -> None:
    offsets, lengths = np.array([0, 60_000]), np.full(2, 60_000)
    with dlfs.open(fresh(tmp_path / "v.img")) as target:
        with target.step_writer("x", {}, step_bytes=50_000, layout="path") as writer:
            for wrong in ([1, "b"], [1, 2, 3], 5):
                with pytest.raises(UsageError, match="add attribute 'a'"):
                    writer.add_batch(
                        [b"a", b"b"], bytes(120_000), offsets, lengths, attributes={"a": wrong}
                    )
            texts = {"a": ["a\0", "b"]}
            writer.add_batch([b"a", b"b"], bytes(120_000), offsets, lengths, attributes=texts)
        with target["x"] as dataset:
            assert dataset.column("a").tolist() == ["a\0", "b"]
        with pytest.raises(UsageError, match="step_bytes"):
            target.step_writer("y", {}, step_bytes=0)


def test_what_has_no_room_in_the_record_is_left_out(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff\xfe" * 100)
    folder(tmp_path).rename(odd)
    for command, kept in (
        ({"arguments": [str(odd)]}, True),
        ({"arguments": ["x" * 20_000]}, False),
    ):
        volume = fresh(tmp_path / f"{kept}.img")
        run(volume, opened(odd), kill_at=8, command=command)
        with dlfs.open(volume) as target:
            (info,) = target.unfinished()
        assert info.origin["source"] == str(odd)
        assert info.origin.get("command") == (command if kept else None)
        assert run(volume, opened(odd), command=command) is not None


def test_other_attributes_are_another_source(tmp_path: Path) -> None:
    path, table, listed = folder(tmp_path), tmp_path / "t.csv", tmp_path / "l.csv"
    names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]

    def write(score: int) -> None:
        table.write_text("path,score\n" + "".join(f"{name},{score}\n" for name in names))
        listed.write_text("path,score\n" + "".join(f"folder/{name},{score}\n" for name in names))

    def attributed(*rules: Rule) -> Source:
        source = AttributedSource(opened(path), rules)
        source.buffer_bytes = 64 * KIB
        return source

    for number, (before, after) in enumerate(
        [
            (lambda: opened(listed), lambda: opened(listed)),
            (lambda: attributed(TableRule(str(table))), lambda: attributed(TableRule(str(table)))),
            (lambda: attributed(label_rule()), lambda: attributed(PathRule("label", "-1"))),
        ]
    ):
        volume = fresh(tmp_path / f"{number}.img")
        write(1)
        assert run(volume, before(), kill_at=8) is None
        write(22)
        with pytest.raises(UsageError, match="are not those of now"):
            run(volume, after())


@pytest.mark.parametrize("position", [0, 4096])
def test_a_damaged_journal_can_be_abandoned(tmp_path: Path, position: int) -> None:
    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    run(volume, opened(path), kill_at=12)
    with dlfs.open(volume) as target:
        record = target._opened().catalog.find_unfinished(b"x")
        assert record is not None
        space = DataSpace(target._opened().superblock.geometry, record.journal_runs)
    flip_bit(Path(volume), space.resolve(position)[1] + 50)
    with pytest.raises(ChecksumError) as caught:
        run(volume, opened(path))
    (note,) = caught.value.__notes__
    assert "its journal is damaged" in note
    assert "goes on with it" not in note
    with dlfs.open(volume) as target:
        assert [finding.kind for finding in target.verify()] == ["journal"]
        target.abandon("x")
    assert run(volume, opened(path)) is not None


def test_a_step_ends_after_many_small_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cutter, "STEP_SAMPLES", 100)
    volume = fresh(tmp_path / "v.img")
    with dlfs.open(volume) as target:
        writer = target.step_writer("x", {}, step_bytes=STEP_BYTES, layout="path")
        nothing = np.zeros(250, np.int64)
        writer.add_batch([b"%d" % number for number in range(250)], b"", nothing, nothing)
        writer.abort()
        target.refresh()
        (info,) = target.unfinished()
        assert info.sample_count == 200


def test_a_rule_that_compares_samples_sees_those_of_earlier_steps(tmp_path: Path) -> None:
    class Comparing(Rule):
        fingerprint = "1"
        needs_all = True

        def __init__(self) -> None:
            self.seen = 0

        def columns(self, block: SampleBlock) -> dict[str, Any]:
            self.seen += len(block.paths)
            return {"number": np.arange(len(block.paths))}

    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    for kill_at in (8, None):
        rule = Comparing()
        source = AttributedSource(opened(path), [rule])
        report = run(volume, source, kill_at=kill_at)
    assert report is not None
    assert 0 < report.kept_count < FILES
    assert rule.seen == FILES


def test_a_seal_that_fails_unlocks_the_volume_and_says_what_is_kept(tmp_path: Path) -> None:
    with dlfs.open(fresh(tmp_path / "v.img")) as target:
        writer = target.step_writer("x", {}, step_bytes=100_000, layout="path")
        lengths = np.full(3, 60_000)
        writer.add_batch([b"a", b"b", b"c"], bytes(180_000), np.arange(3) * 60_000, lengths)
        with pytest.raises(ExistsError, match="'a'") as raised, writer:
            writer.add_directory(b"a")
        (note,) = raised.value.__notes__
        assert "3 samples, 175.8 KiB, are kept as an unfinished import" in note
        assert target.abandon("x").sample_count == 3


# ---- appending -----------------------------------------------------------------------------------


def appended(volume: str, path: Path, *, kill_at: int | None = None, **options: Any) -> Any:
    return run(volume, opened(path), kill_at=kill_at, append=True, **options)


def with_base(path: Path) -> str:
    volume = fresh(path)
    samples = {f"{'abc'[n % 3]}/old{n:03}": bytes([n]) * (n * 37) for n in range(150)}
    with dlfs.open(volume) as target, target.writer("x", layout="path") as writer:
        for name, data in samples.items():
            writer.add(name, data)
        writer.add_directory("gone/for/good")
    return volume


def test_a_killed_append_goes_on_to_the_same_version(tmp_path: Path) -> None:
    path = folder(tmp_path)
    whole, killed = with_base(tmp_path / "whole.img"), with_base(tmp_path / "killed.img")
    assert appended(whole, path, step_bytes=None) is not None
    kept = []
    for kill_at in range(2, 40):
        found = appended(killed, path, kill_at=kill_at)
        with dlfs.open(killed) as volume:
            assert len(volume.versions("x")) == (2 if found else 1)
            kept += [info.sample_count for info in volume.unfinished()]
        if found:
            break
    assert found is not None
    assert found.kept_count == kept[-1] > 0
    assert len(set(kept)) > 2
    one, other = everything(killed), everything(whole)
    assert (one[0], *one[2:4], *one[5:]) == (other[0], *other[2:4], *other[5:])
    assert read_dataset(killed, "x") == read_dataset(whole, "x")
    assert len(read_dataset(killed, "x@1")) == 150


def test_another_writer_appends_while_an_append_is_sealed(tmp_path: Path) -> None:
    with dlfs.open(with_base(tmp_path / "v.img")) as volume:
        writer = volume.step_writer("x", {}, append=True, step_bytes=1, layout="path")
        nothing = np.zeros(1, np.int64)
        for number in range(3):
            writer.add_batch([b"new%d" % number], b"1", nothing, nothing + 1)
        versions: list[int] = []

        def append(_samples: int) -> None:
            if len(versions) < 5:
                with dlfs.open(volume.uri) as other:
                    write_dataset(other, "x", {f"other{len(versions)}": b"2"}, append=True)
                    versions.append(other.versions("x")[-1].version)

        writer.seal(append)
        assert 1 < len(versions) <= 5
        samples = read_dataset(volume, "x")
        assert len(samples) == 150 + 3 + len(versions)
        assert [info.version for info in volume.versions("x")] == [1, *versions, versions[-1] + 1]
        assert list(volume.verify()) == []


def test_an_append_is_refused_if_the_dataset_has_changed_otherwise(tmp_path: Path) -> None:
    lengths = np.ones(1, np.int64)

    def append(volume: dlfs.Volume, changed: dict[str, Any]) -> None:
        writer = volume.step_writer("x", {}, append=True, step_bytes=1, layout="path")
        writer.add_batch([b"new"], b"1", lengths - 1, lengths, attributes={"n": [1]})
        with dlfs.open(volume.uri) as other, other.writer("x") as another:
            another.add("a", b"1", attributes=changed)
        writer.seal()

    wrong: Any = {"n": 1.5}, {"n": "text"}, {"n": 1, "more": 2}, {}
    for number, changed in enumerate(wrong):
        path = fresh(tmp_path / f"{number}.img")
        write_dataset(path, "x", {"old": b"1"}, attributes=[{"n": 3}])
        with dlfs.open(path) as volume:
            with pytest.raises(UsageError, match="append to version 2 of 'x', which is new"):
                append(volume, changed)
            assert len(volume.unfinished()) == 1
            volume.remove("x", 2)
            with volume.step_writer("x", {}, append=True, step_bytes=1, layout="path"):
                pass  # goes on, and is sealed
            with volume["x"] as dataset:
                assert dataset.column("n").tolist() == [1, 3]


def test_the_version_to_append_to_is_gone(tmp_path: Path) -> None:
    with dlfs.open(with_base(tmp_path / "v.img")) as volume:
        writer = volume.step_writer("x", {}, append=True, step_bytes=1, layout="path")
        writer.add_batch([b"new"], b"1", np.zeros(1, np.int64), np.ones(1, np.int64))
        volume.remove("x")
        with pytest.raises(NotFoundError, match="'x'"):
            writer.seal()
        assert volume.abandon("x").sample_count == 1


def test_paths_that_the_version_has_are_found_by_each_batch(tmp_path: Path) -> None:
    lengths = np.ones(2, np.int64)
    with dlfs.open(with_base(tmp_path / "v.img")) as volume:
        writer = volume.step_writer("x", {}, append=True, step_bytes=1, layout="path")
        with pytest.raises(ExistsError, match="'b/old001': it was added already"), writer:
            writer.add_batch([b"b/old001", b"new"], b"12", lengths - 1, lengths)
        assert volume.unfinished() == []


def test_another_format_is_another_source(tmp_path: Path) -> None:
    path, volume = folder(tmp_path), fresh(tmp_path / "v.img")
    assert run(volume, opened(path), kill_at=8) is None
    source = open_source(path, format_name="imagefolder")
    with pytest.raises(UsageError, match="are not those of now"):
        run(volume, source)


def test_journals_are_among_the_expected_space(tmp_path: Path) -> None:
    with dlfs.open(fresh(tmp_path / "v.img")) as target:
        free_bytes = target.usage().free_bytes
        samples = free_bytes // 148  # of which 32 bytes in the directory have room once, not twice
        options = {"expected_samples": samples, "expected_bytes": samples * 100}
        target.step_writer("x", {}, step_bytes=1 << 40, **options).abort()
        with pytest.raises(SpaceError):
            target.step_writer("x", {}, step_bytes=1 << 20, **options)
