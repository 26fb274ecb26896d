"""Each verb on a real volume, in this process."""

from __future__ import annotations

import errno
import io
import os
import signal
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import dlfs
from dlfs.cli.verbs import import_
from dlfs.dataset.step_writer import StepWriter
from dlfs.dataset.writer import DatasetWriter
from dlfs.errors import DeviceError
from dlfs.reader import parts
from tests.support.files import flip_bit, write_files
from tests.support.volumes import new_volume, write_dataset


def flip_sample(run, volume: Path, *which: str) -> dict:
    """Flip a bit of a sample of ``small``; what stat says of it."""
    found = run("stat", volume, "small", *which, "--json").json["samples"][0]
    flip_bit(volume, found["offset_bytes"])
    return found


# ---- format, info, version, uri ------------------------------------------------------------------


def test_format_makes_a_volume_of_two_members(run, tmp_path) -> None:
    uri = f"{tmp_path}/a.img,{tmp_path}/b.img"
    done = run("format", uri, "--size", "16MiB", "--chunk", "64KiB", "--label", "two", "--json")
    assert done.code == 0
    assert done.json["label"] == "two"
    assert done.json["chunk_bytes"] == 65536
    assert [member["number"] for member in done.json["members"]] == [0, 1]
    assert run("info", uri, "--json").json["uuid"] == done.json["uuid"]


def test_format_does_not_overwrite_unasked(run, volume) -> None:
    done = run("format", volume)
    assert done.code == 1
    assert done.out == b""
    assert done.err.startswith("dlfs: format ")
    assert "already; --force overwrites it" in done.err
    assert run("format", volume, "--force").code == 0
    assert run("ls", volume).out == b""


def test_format_says_what_size_it_wants(run, tmp_path) -> None:
    done = run("format", tmp_path / "x.img", "--size", "plenty")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "'plenty'" in done.err
    done = run("format", tmp_path / "x.img")
    assert (done.code, "with a size it is made, such as --size 1GiB" in done.err) == (2, True)
    done = run("format", tmp_path / "x.img", "--size", "8MiB", "--chunk", "4KiB", "--block", "8KiB")
    assert "expected a block of at most the chunk's 4096 bytes, got 8192" in done.err


def test_info(run, volume) -> None:
    found = run("info", volume, "--json").json
    assert found["generation"] == 2
    assert [copy["state"] for copy in found["members"][0]["superblocks"]] == [
        "current",
        "previous",
        "current",
    ]
    assert [dataset["name"] for dataset in found["datasets"]] == ["small"]
    text = run("info", volume).out.decode()
    for part in (found["uuid"], "tests", "small@1", "current (2)", str(volume)):
        assert part in text


def test_info_sends_no_control_characters_of_a_label_to_a_terminal(run, tmp_path) -> None:
    uri = str(tmp_path / "labelled")
    assert run("format", uri, "-s", "4MiB", "--label", "a\x1b]0;b\x07c").code == 0
    assert r"a\x1b]0;b\x07c" in run("info", uri).out.decode()


def test_info_names_a_damaged_superblock(run, volume) -> None:
    flip_bit(volume, 100)
    done = run("info", volume)
    assert done.code == 0
    assert b"damaged" in done.out
    assert "CRC32C" in done.err


def test_version(run) -> None:
    assert run("version", "--json").json["dlfs"] == dlfs.__version__
    assert run("--version").out == run("version").out


def test_uri(run) -> None:
    kinds = [scheme["scheme"] for scheme in run("uri", "--json").json["schemes"]]
    assert kinds == ["file", "mem", "nvme-tcp", "nvme-tcp+discover", "spdk"]
    assert b"nvme-tcp+discover" in run("uri").out
    explained = run("uri", "/a.img,mem:64MiB", "--json").json["members"]
    assert [member["kind"] for member in explained] == ["FileUri", "MemoryUri"]
    assert b"path = /a.img" in run("uri", "/a.img").out
    assert run("uri", "what:ever").code == 2


# ---- import, export ------------------------------------------------------------------------------


def read_tree(folder: Path) -> dict[bytes, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {os.fsencode(path.relative_to(folder)): path.read_bytes() for path in files}


def test_import_and_export_a_folder(run, volume, samples, tmp_path) -> None:
    write_files(tmp_path / "source", samples)
    done = run("import", tmp_path / "source", volume, "--name", "tree", "--json")
    assert done.code == 0
    assert done.json["dataset"]["sample_count"] == len(samples)
    assert "imported tree@1: 6 samples" in done.err
    assert run("export", volume, "tree", tmp_path / "out", "--json").json["sample_count"] == 6
    assert read_tree(tmp_path / "out") == samples
    assert run("export", volume, "tree", tmp_path / "out").code == 1
    assert run("export", volume, "tree", tmp_path / "out", "--force").code == 0


def test_import_appends_in_the_layout_of_the_version_before(run, volume, tmp_path) -> None:
    write_files(tmp_path / "source", {b"a": b"a"})
    command = ["import", tmp_path / "source", volume, "--name", "tree", "--json"]
    assert run(*command).json["dataset"]["layout"] == "shuffled"
    assert run(*command, "--layout", "path").json["dataset"]["layout"] == "path"
    write_files(tmp_path / "source", {b"b": b"b"})
    done = run(*command, "--append", "--skip-existing")
    assert (done.json["dataset"]["version"], done.json["dataset"]["layout"]) == (3, "path")


def test_import_appends_what_is_new(run, volume, samples, tmp_path) -> None:
    write_files(tmp_path / "source", samples)
    command = ["import", tmp_path / "source", volume, "--name", "tree"]
    assert run(*command, "--append").code == 3
    assert run(*command, "--skip-existing").code == 2
    assert run(*command).code == 0
    write_files(tmp_path / "source", {b"new/1": b"1", b"new/2": b"2"})
    refused = run(*command, "--append").err
    assert "it was added already; --skip-existing leaves out samples that" in refused
    done = run(*command, "--append", "--skip-existing", "--json")
    assert "appended 2 samples" in done.err
    assert "tree@2 has 8 samples" in done.err
    assert done.json["skipped"] == {"sample that the dataset has already": 6}
    assert (
        "nothing to append: tree@2 has 8 samples"
        in run(*command, "--append", "--skip-existing").err
    )
    assert run("export", volume, "tree", tmp_path / "out").code == 0
    assert read_tree(tmp_path / "out") == {**samples, b"new/1": b"1", b"new/2": b"2"}


def test_import_archives_as_a_new_version(run, volume, tmp_path) -> None:
    for number in range(2):
        (tmp_path / "file").write_bytes(b"%d" % number)
        with tarfile.open(tmp_path / f"part-{number}.tar", "w") as archive:
            archive.add(tmp_path / "file", f"{number}.txt")
    done = run("import", f"{tmp_path}/part-{{0..1}}.tar", volume, "-n", "small", "--layout", "path")
    assert done.code == 0
    assert run("ls", volume).out == b"small@1\nsmall@2\n"
    assert run("ls", volume, "small").out == b"0.txt\n1.txt\n"
    assert run("cat", volume, "small@1", "top").out == b"top"


def test_export_an_archive(run, volume, samples, tmp_path) -> None:
    assert run("export", volume, "small", tmp_path / "x.tar.gz").code == 0
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        names = {os.fsencode(name) for name in archive.getnames()}
    assert names == set(samples)


def test_export_by_suffix(run, volume, tmp_path) -> None:
    for name in ("x.zip", "x.parquet", "x.arrow"):
        done = run("export", volume, "small", tmp_path / name)
        assert (done.code, (tmp_path / name).is_file()) == (
            0 if name != "x.zip" else 2,
            name != "x.zip",
        )
    assert "ZIP" in run("export", volume, "small", tmp_path / "x.zip").err
    done = run("export", volume, "small", tmp_path / "x.rar")
    assert (done.code, ".tar.zst, .zip, .arrow, .parquet, got .rar" in done.err) == (2, True)
    assert run("export", volume, "small", f"{tmp_path}/x.rar/").code == 0
    assert (tmp_path / "x.rar" / "top").read_bytes() == b"top"
    assert run("export", volume, "small", tmp_path / "f.zip", "--to", "folder").code == 0
    assert (tmp_path / "f.zip" / "top").read_bytes() == b"top"


def test_export_to_standard_output(run, volume, samples) -> None:
    done = run("export", volume, "small", "-")
    assert done.code == 0
    with tarfile.open(fileobj=io.BytesIO(done.out), errors="surrogateescape") as archive:
        assert {os.fsencode(m.name): archive.extractfile(m).read() for m in archive} == samples
    for wrong in (["--json"], ["--to", "arrow"]):
        done = run("export", volume, "small", "-", *wrong)
        assert (done.code, done.out) == (2, b"")


def test_export_goes_on_where_it_is_reported_to_skip_bad_samples(
    run, volume, samples, tmp_path
) -> None:
    flip_sample(run, volume, "a/two.txt")
    done = run("export", volume, "small", tmp_path / "first")
    assert done.code == 4
    assert b"a/two.txt" not in read_tree(tmp_path / "first")
    done = run("export", volume, "small", tmp_path / "out", "--skip-bad", "--json")
    assert (done.code, done.json["sample_count"], done.json["bad_count"]) == (4, 5, 1)
    assert "left out: read sample" in done.err
    assert "a/two.txt" in done.err
    assert read_tree(tmp_path / "out") == {p: d for p, d in samples.items() if p != b"a/two.txt"}


def test_import_leaves_out_bad_records_and_info_lists_them(run, volume, tmp_path) -> None:
    source = tmp_path / "source"
    write_files(source, {f"{number}": b"x" for number in range(20)})
    for number in range(12):
        (source / f"broken {number}").symlink_to("nothing")
    done = run("import", source, volume, "--name", "some", "--skip-bad", "11")
    assert (done.code, done.out) == (4, b"")
    assert "expected at most 11 bad records, got 12; such as" in done.err
    assert "some" not in run("ls", volume).out.decode()
    done = run("import", source, volume, "--name", "some", "--skip-bad", "12", "--json")
    assert done.code == 4
    assert "imported some@1: 20 samples" in done.err
    assert done.err.count("bad record: ") == 10
    assert "left out bad records: 12 (12 x does not fit the dataset)" in done.err
    assert done.json["dataset"]["bad_count"] == done.json["bad_records"]["count"] == 12
    assert len(done.json["bad_records"]["records"]) == 12
    found = run("info", volume, "some", "--json").json
    assert found["bad_records"] == done.json["bad_records"]
    assert [each["bad_count"] for each in found["versions"]] == [12]
    shown = run("info", volume, "some").out.decode()
    assert "bad records left out of some@1: 12 (12 x does not fit the dataset)" in shown
    assert shown.count("the symbolic link leads to nothing") == 12
    assert "bad records left out of some@1: 12; 'dlfs info VOLUME some@1' lists" in (
        run("info", volume).out.decode()
    )
    assert run("import", source, volume, "--name", "x", "--skip-bad", "many").code == 2
    assert run("info", volume, "none").code == 3


def test_info_of_a_dataset_shows_its_versions_and_columns(run, volume) -> None:
    write_dataset(volume, "tagged", {"a": b"1"}, attributes=[{"label": 3}])
    write_dataset(volume, "tagged", {"b": b"2"}, append=True, attributes=[{"label": 4}])
    shown = run("info", volume, "tagged").out.decode()
    assert "tagged@1" in shown
    assert "columns of tagged@2: label: int64" in shown
    assert "bad" not in shown
    found = run("info", volume, "tagged@1", "--json").json
    assert [each["version"] for each in found["versions"]] == [1]
    assert found["columns"] == {"label": "int64"}


def test_import_goes_on_or_is_abandoned(run, tmp_path, monkeypatch) -> None:
    source, elsewhere = tmp_path / "made" / "photos", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_files(source, {f"{number:02}": bytes([number]) * 50_000 for number in range(40)})
    monkeypatch.chdir(source.parent)
    assert run("format", "a.img,b.img", "--size", "16MiB").code == 0

    def fail(_writer: StepWriter, _tick: object) -> None:
        raise DeviceError("the network is down", errno.EIO)

    for name in ("x", "y"):
        with monkeypatch.context() as broken:
            broken.setattr(StepWriter, "seal", fail)
            failed = run("import", "photos", "a.img,b.img", "-n", name, "--step", "1MiB")
        assert "are kept as an unfinished import" in failed.err
    found = run("info", "a.img,b.img", "--json").json["unfinished"]
    assert [(each["name"], each["origin"]["source"]) for each in found] == [
        ("x", "photos"),
        ("y", "photos"),
    ]
    monkeypatch.chdir(elsewhere)
    members = "../made/a.img,../made/b.img"
    assert "got x, y; --name chooses one" in run("import", "--resume", members).err
    for options in (["--seed", "3"], ["--layout", "path"], ["--format", "folder"]):
        assert "no options of a new" in run("import", "--resume", members, *options).err
    done = run("import", str(source), members, "-n", "x", "--step", "0")
    assert "expected no unfinished import of this name" in done.err
    done = run("import", "--resume", members, "-n", "x")
    assert done.code == 0
    assert "imported x@1: 40 samples" in done.err
    monkeypatch.chdir(elsewhere)
    source.parent.rename(tmp_path / "moved")
    members = "../moved/a.img,../moved/b.img"
    assert "where the import of y began" in run("import", "--resume", members).err
    assert run("import", "--abandon", "y", members, "--json").json["abandoned"]["name"] == "y"
    assert "got none" in run("import", "--resume", members).err


def test_an_import_goes_on_without_the_directory_of_its_join_file(tmp_path, monkeypatch) -> None:
    """That of a training's ranks is deleted; another one is kept."""
    monkeypatch.chdir(tmp_path)
    command = {"arguments": ["photos", "a.img"], "name": "x", "step": None}
    for join_file, kept in (("gone/join", None), ("join", "join")):
        origin = {"command": {**command, "join_file": join_file}, "directory": str(tmp_path)}
        found = import_._kept_command(SimpleNamespace(name="x", origin=origin), "v")
        assert found["join_file"] == kept


def test_the_second_pass_goes_on_without_the_source(run, volume, tmp_path, monkeypatch) -> None:
    def fail(_writer: StepWriter) -> bool:
        raise DeviceError("the network is down", errno.EIO)

    write_files(tmp_path / "made", {f"{number}": bytes(5_000) for number in range(40)})
    archive = tmp_path / "x.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "made", ".")
    monkeypatch.setattr(StepWriter, "_pack_again", fail)
    failed = run("import", archive, volume, "-n", "x", "--step", "100KiB")
    assert "40 samples, 195.3 KiB, are kept as an unfinished import" in failed.err
    monkeypatch.undo()
    archive.unlink()
    (info,) = run("info", volume, "--json").json["unfinished"]
    assert (info["sample_count"], info["packed_again"]) == (40, 0)
    assert b"second pass" in run("info", volume).out
    done = run("import", "--resume", volume)
    assert "going on with the second pass of x" in done.err
    assert "imported x@1: 40 samples (40 were there)" in done.err
    assert run("verify", volume).code == 0


def test_one_pass_is_an_option_of_an_import(run, volume, tmp_path) -> None:
    write_files(tmp_path / "made", {f"{number}": bytes(5_000) for number in range(40)})
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "made", ".")
    done = run("import", tmp_path / "x.tar.gz", volume, "-n", "x", "--one-pass", "--json")
    assert (done.code, done.json["warnings"]) == (0, [])


def test_a_command_is_kept_without_secrets(run, volume, tmp_path, monkeypatch) -> None:
    def fail(_writer: StepWriter, _tick: object) -> None:
        raise DeviceError("the network is down", errno.EIO)

    monkeypatch.setattr(StepWriter, "seal", fail)
    write_files(tmp_path / "made", {f"{number}": bytes(50_000) for number in range(8)})
    (tmp_path / "list").write_text("".join(f"made/{number}\n" for number in range(8)))
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "https:" / "user:pw@host" / "t.csv"
    table.parent.mkdir(parents=True)
    table.write_text("path,x\n" + "".join(f"{number},1\n" for number in range(8)))
    secret = "https://user:pw@host/t.csv"
    failed = run("import", "made", volume, "-n", "x", "--step", "100KiB", "--attributes", secret)
    assert "are kept as an unfinished import" in failed.err
    (info,) = run("info", volume, "--json").json["unfinished"]
    assert info["origin"]["command"] is None
    assert "its URLs have secrets" in run("import", "--resume", volume).err
    for value in (secret, ["x=1", secret]):
        assert import_._without_secrets({"arguments": ["made"], "other": value}) is None


def test_import_wants_source_and_volume(run, volume) -> None:
    assert run("import", volume, "--name", "x").code == 2
    assert run("import", volume.parent, volume).code == 2


def test_import_says_that_the_volume_comes_last(run, volume, tmp_path) -> None:
    photos = tmp_path / "photos"
    write_files(photos, {b"a": b"1"})
    swapped = run("import", volume, photos, "--name", "d")
    assert swapped.code == 2
    assert f"the volume comes last, got the volume {volume} first" in swapped.err
    for last, code in ((photos, 2), (photos / "a", 4), (tmp_path / "nothing", 3)):
        done = run("import", photos, last, "--name", "d")
        assert (done.code, f"open {last}" in done.err) == (code, True)
        assert "; import takes the volume last, as SOURCE... VOLUME" in done.err
    assert run("ls", volume).out == b"small@1\n"


@pytest.mark.parametrize("name", ["a@1", "--help", "a\nb", "incoming", " a"])
def test_import_refuses_a_name_before_it_reads_the_source(run, volume, tmp_path, name) -> None:
    done = run("import", tmp_path / "nothing", volume, f"--name={name}")
    assert done.code == 2
    assert "a dataset's name is 1 to 244 bytes" in done.err
    assert run("ls", volume).out == b"small@1\n"


def test_import_of_an_empty_source_is_an_error_unless_it_is_allowed(run, volume, tmp_path) -> None:
    (tmp_path / "photos").mkdir()
    done = run("import", tmp_path / "photos", volume, "--name", "photos")
    assert (done.code, len(done.err.splitlines())) == (3, 1)
    assert "photos: expected at least one sample, got none: it holds nothing" in done.err
    assert run("ls", volume).out == b"small@1\n"
    done = run("import", tmp_path / "photos", volume, "--name", "photos", "--allow-empty")
    assert (done.code, "imported photos@1: 0 samples" in done.err) == (0, True)


def test_import_of_what_does_not_fit_changes_nothing(run, volume, tmp_path) -> None:
    (tmp_path / "big").mkdir()
    with (tmp_path / "big" / "file").open("wb") as file:
        file.truncate(64 << 20)
    done = run("import", tmp_path / "big", volume, "--name", "big")
    assert (done.code, len(done.err.splitlines())) == (6, 1)
    assert run("ls", volume).out == b"small@1\n"


def test_interrupted_import_changes_nothing(run, volume, samples, tmp_path, monkeypatch) -> None:
    write_files(tmp_path / "source", samples)
    add_batch = DatasetWriter.add_batch

    def interrupted(*arguments, **named) -> None:
        add_batch(*arguments, **named)
        os.kill(os.getpid(), signal.SIGINT)

    before = run("info", volume, "--json").json
    monkeypatch.setattr(DatasetWriter, "add_batch", interrupted)
    done = run("import", tmp_path / "source", volume, "--name", "tree")
    assert (done.code, done.err) == (130, "dlfs: interrupted\n")
    monkeypatch.undo()
    assert run("info", volume, "--json").json == before
    assert run("import", tmp_path / "source", volume, "--name", "tree").code == 0


def test_second_writer_is_reported_of_the_first(run, volume, tmp_path) -> None:
    write_files(tmp_path / "source", {b"x": b"x"})
    with dlfs.open(str(volume)) as opened, opened.writer("first") as writer:
        writer.add("y", b"y")
        done = run("import", tmp_path / "source", volume, "--name", "second")
        assert done.code == 5
        assert str(os.getpid()) in done.err
        assert run("rm", volume, "small", "--yes").code == 5


# ---- ls, stat, cat -------------------------------------------------------------------------------


def test_ls_datasets(run, volume) -> None:
    assert run("ls", volume).out == b"small@1\n"
    assert b"small@1" in run("ls", volume, "-l").out
    assert run("ls", volume, "--json").json["datasets"][0]["sample_count"] == 6


def test_ls_a_directory(run, volume) -> None:
    assert run("ls", volume, "small").out == b"a/\nb/\nodd \n\xff name\ntop\n"
    assert run("ls", volume, "small", "b/").out == b"c/\nempty\n"
    assert run("ls", volume, "small", "b/empty").out == b"b/empty\n"
    assert run("ls", volume, "small", "b", "-l").out.splitlines()[1:] == [
        b"         2          1 sample  c/",
        b"         3               0 B  empty",
    ]


def test_ls_recursive(run, volume, samples) -> None:
    names = run("ls", volume, "small", "-R", "-0").out.split(b"\0")
    assert names == [*sorted(samples), b""]
    long = run("ls", volume, "small", "b", "-R", "-l", "--bytes").out.splitlines()
    assert long[1].split() == [b"2", b"300000", b"b/c/deep"]


def test_ls_json_keeps_every_byte_of_a_path(run, volume, samples) -> None:
    found = run("ls", volume, "small", "--recursive", "--json").json
    assert found["dataset"] == "small"
    sizes = {os.fsencode(e["path"]): e["length_bytes"] for e in found["entries"]}
    assert sizes == {name: len(data) for name, data in samples.items()}
    top = run("ls", volume, "small", "--json").json["entries"]
    assert top[0] == {"path": "a", "kind": "directory", "first_index": 0, "sample_count": 2}


def test_ls_pages(run, tmp_path) -> None:
    uri = new_volume(tmp_path / "many.img", size_bytes=16 << 20)
    names = [f"{n:05}" for n in range(10_000)]
    write_dataset(uri, "many", dict.fromkeys(names, b""))
    assert run("ls", uri, "many").out.decode().split() == names
    assert len(run("ls", uri, "many", "-R", "--json").json["entries"]) == len(names)


def test_ls_of_nothing(run, volume) -> None:
    done = run("ls", volume, "small", "nowhere", "--json")
    assert (done.code, done.out) == (3, b"")
    assert run("ls", volume, "small", "-0", "-l").code == 2
    with dlfs.open(str(volume)) as opened, opened.writer("empty"):
        pass
    assert run("ls", volume, "empty", "--json").json["entries"] == []


def test_stat(run, volume) -> None:
    done = run("stat", volume, "small", "a/two.txt", "--index", "-1", "--json")
    two, top = done.json["samples"]
    assert (two["index"], two["length_bytes"], two["member"]) == (1, 3000, str(volume))
    assert (top["path"], top["index"]) == ("top", 5)
    with volume.open("rb") as file:
        file.seek(top["offset_bytes"])
        assert file.read(3) == b"top"
    assert top["crc32c"].encode() in run("stat", volume, "small", "top").out
    assert run("stat", volume, "small", "--json").json["layout"] == "shuffled"
    assert b"small@1" in run("stat", volume, "small").out


def test_cat(run, volume, samples) -> None:
    name = b"odd \n\xff name"
    done = run("cat", volume, "small", os.fsdecode(name), "b/c/deep", "-i", "0")
    assert done.out == samples[name] + samples[b"b/c/deep"] + b"one"


def test_cat_of_a_large_sample_that_is_damaged(run, volume, samples, monkeypatch) -> None:
    """It is written as it is read, up to the damaged part."""
    monkeypatch.setattr(parts, "PIECE_BYTES", 100_000)
    data = samples[b"b/c/deep"]
    assert run("cat", volume, "small", "b/c/deep").out == data
    found = run("stat", volume, "small", "b/c/deep", "--json").json["samples"][0]
    flip_bit(volume, found["offset_bytes"] + (256 << 10) + 9)  # in its second chunk
    done = run("cat", volume, "small", "b/c/deep")
    assert (done.code, done.out) == (4, data[:200_000])
    assert "sample 2 'b/c/deep' of dataset 'small'" in done.err
    assert "bytes 262144 to 299999 of 300000 bytes: expected CRC32C" in done.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["cat", "VOLUME", "small", "nowhere"], 3),
        (["cat", "VOLUME", "small", "--index", "6"], 3),
        (["stat", "VOLUME", "small", "--index", "-7"], 3),
        (["cat", "VOLUME", "large", "top"], 3),
        (["cat", "VOLUME", "small@2", "top"], 3),
        (["cat", "VOLUME.not", "small", "top"], 3),
        (["cat", "VOLUME", "small"], 2),
        (["cat", "VOLUME", "@", "x"], 3),
        (["cat", "VOLUME", "", "x"], 2),
        (["cat"], 2),
        (["dog"], 2),
        (["--loud"], 2),
        ([], 2),
    ],
)
def test_one_line_and_a_code(run, volume, arguments, code) -> None:
    done = run(*(word.replace("VOLUME", str(volume)) for word in arguments))
    assert done.code == code
    if arguments:
        assert done.out == b""
        assert len(done.err.splitlines()) == 1
        assert done.err.startswith("dlfs: ")


def test_debug_shows_the_traceback(run, volume) -> None:
    done = run("--debug", "cat", volume, "small", "nowhere")
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("dlfs: ")


def test_unwritable_target_is_a_failed_device(run, volume) -> None:
    assert run("export", volume, "small", "/proc/nowhere").code == 7


# ---- verify --------------------------------------------------------------------------------------


def test_verify_a_whole_volume(run, volume) -> None:
    done = run("verify", volume)
    assert (done.code, done.out) == (0, b"")
    assert "all good" in done.err
    found = run("verify", volume, "small", "--json").json
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["checked_bytes"] > 300_000


def test_verify_names_every_bad_sample(run, volume) -> None:
    bad = [flip_sample(run, volume, "top"), flip_sample(run, volume, "-i", "4")]
    done = run("verify", volume, "--json")
    assert done.code == 4
    problems = {problem["path"]: problem for problem in done.json["problems"]}
    assert len(problems) == done.json["problem_count"] == 2
    for sample in bad:
        problem = problems[sample["path"]]
        assert problem["kind"] == "sample"
        assert problem["dataset"] == "small"
        assert (problem["member"], problem["offset_bytes"]) == (
            sample["member"],
            sample["offset_bytes"],
        )
        assert "expected CRC32C" in problem["message"]
    text = run("verify", volume)
    assert (text.code, len(text.out.splitlines())) == (4, 2)
    assert "2 bad" in text.err


def test_damage_is_never_printed(run, volume) -> None:
    flip_sample(run, volume, "top")
    done = run("cat", volume, "small", "top")
    assert (done.code, done.out) == (4, b"")
    assert "'top'" in done.err


def test_what_is_no_volume_is_damaged(run, tmp_path) -> None:
    (tmp_path / "noise").write_bytes(b"noise" * 1_000_000)
    assert run("verify", tmp_path / "noise").code == 4


# ---- rm ------------------------------------------------------------------------------------------


def test_rm_asks_for_yes_without_a_terminal(run, volume) -> None:
    done = run("rm", volume, "small")
    assert done.code == 2
    assert "--yes" in done.err
    assert run("ls", volume).out == b"small@1\n"


def test_rm(run, volume) -> None:
    free = run("info", volume, "--json").json["free_bytes"]
    done = run("rm", volume, "small", "--yes", "--json")
    assert done.json["removed"][0]["name"] == "small"
    assert run("ls", volume).out == b""
    assert run("info", volume, "--json").json["free_bytes"] > free
    assert run("rm", volume, "small", "-y").code == 3


def test_rm_of_one_of_several_versions(run, volume) -> None:
    with dlfs.open(str(volume)) as opened:
        for _ in range(2):
            with opened.writer("small") as writer:
                writer.add("x", b"x")
    assert run("rm", volume, "small", "-y").code == 2
    assert run("rm", volume, "small@2", "-y").code == 0
    assert run("ls", volume).out == b"small@1\nsmall@3\n"
    assert run("rm", volume, "small", "-y", "--all-versions").code == 0
    assert run("ls", volume).out == b""


# ---- formats of import ---------------------------------------------------------------------------


def test_import_lists_its_formats(run) -> None:
    done = run("import", "--formats")
    assert done.code == 0
    text = done.out.decode()
    assert "tar archives and WebDataset shards, every member" in text
    assert "links=follow|skip|error: symbolic links" in text
    assert "(default: no)" in text


def test_import_takes_a_format_and_its_options(run, volume, tmp_path) -> None:
    write_files(tmp_path / "in", {"a": b"x"})
    (tmp_path / "in" / "b").symlink_to("a")
    source = tmp_path / "in"
    options = ["--format", "folder", "--option", "links=skip"]
    done = run("import", source, volume, "-n", "n", *options)
    assert (done.code, run("ls", volume, "n").out) == (0, b"a\n")
    done = run("import", source, volume, "-n", "n", "--option", "volume=11")
    assert done.code == 2
    assert "format folder takes no option 'volume'" in done.err
    assert run("import", source, volume, "-n", "n", "--format", "floppy").code == 2
