"""``dlfs://``: fsspec's own tests, and what they do not ask."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import fsspec.tests.abstract as abstract
import pytest

import dlfs
from dlfs.adapters.files import directories
from dlfs.adapters.fsspec import BATCH_BYTES, DlfsFileSystem
from dlfs.adapters.grouping import group_by_bytes
from dlfs.base.extras import install_command
from tests.support.files import write_at
from tests.unit.adapters.conftest import COUNT


def names(samples: dict[bytes, bytes], base: str) -> list[str]:
    return [f"{base}/{path.decode()}" for path in sorted(samples)]


@pytest.fixture
def base(volume_path) -> str:
    return f"{volume_path}!/numbers"


@pytest.fixture
def fs() -> DlfsFileSystem:
    return fsspec.filesystem("dlfs", skip_instance_cache=True)


# ---- fsspec's own --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def populated(make_volume, tmp_path_factory) -> str:
    """A volume with a dataset for every tree that fsspec's tests want."""
    local = fsspec.filesystem("file", auto_mkdir=True)
    scenarios = abstract.BaseAbstractFixtures()
    makers = {
        "bulk": scenarios._bulk_operations_scenario_0,
        "edge": scenarios._glob_edge_cases_files,
        "prefix": scenarios._dir_and_file_with_same_name_prefix,
        "hashed": scenarios._10_files_with_hashed_names,
    }
    trees: dict[str, dict[str, bytes]] = {"src": {"file": b""}}
    for name, make in makers.items():
        root = tmp_path_factory.mktemp(name)
        make(local, os.path.join, str(root))
        files = [path for path in root.rglob("*") if path.is_file()]
        trees[name] = {str(path.relative_to(root)): path.read_bytes() for path in files}
    return f"{make_volume(**trees)}!"


class TestAbstract(abstract.AbstractFixtures, abstract.AbstractGetTests):
    """The generic tests of what a read-only file system does, on trees that are there already.

    Those of opening, piping, putting and copying replace files in a dataset with others, which is
    refused: see ``test_fsspec_writing``.
    """

    @pytest.fixture
    def fs(self) -> DlfsFileSystem:
        return fsspec.filesystem("dlfs")

    @pytest.fixture
    def fs_path(self, populated) -> str:
        return populated

    def test_get_directory_recursive(  # type: ignore[override]
        self, monkeypatch, fs, fs_join, fs_path, local_fs, local_join, local_target
    ):
        """This one makes what it needs by itself; it is there."""
        monkeypatch.setattr(fs, "mkdir", lambda path: None)
        monkeypatch.setattr(fs, "touch", lambda path: None)
        assert fs.isfile(fs_join(fs_path, "src", "file"))
        super().test_get_directory_recursive(
            fs, fs_join, fs_path, local_fs, local_join, local_target
        )

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, populated) -> str:
        return f"{populated}/bulk/source"

    @pytest.fixture
    def fs_glob_edge_cases_files(self, populated) -> str:
        return f"{populated}/edge/source"

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, populated) -> str:
        return f"{populated}/prefix/source"

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, populated) -> str:
        return f"{populated}/hashed/source"


# ---- paths and listings --------------------------------------------------------------------------


def test_it_is_registered(volume_path):
    code = f"import fsspec; print(fsspec.open('dlfs://{volume_path}!/other/one').open().read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "b'1'\n"


def test_paths_name_the_volume_or_an_option_does(fs, volume_path):
    within = fsspec.filesystem("dlfs", volume=str(volume_path))
    many = fsspec.filesystem("dlfs", volume=[str(volume_path)])
    plain = str(volume_path).lstrip("/")
    for text in (plain, f"/{plain}"):
        assert fs.ls(f"dlfs://{text}!", detail=False) == [f"{text}!/numbers", f"{text}!/other"]
    assert fs.ls(f"file:{volume_path}!/other/", detail=False)[1] == f"file:{volume_path}!/other/one"
    for one in (within, many):
        assert one.ls("", detail=False) == one.ls("dlfs:///", detail=False) == ["numbers", "other"]
        assert one.cat("other/one") == one.cat("/other/one") == one.cat("dlfs://other/one") == b"1"
    assert fs.cat_file(fs.unstrip_protocol(f"{plain}!/other/one")) == b"1"


def test_listings_are_those_of_a_mount(fs, base, samples):
    classes = fs.ls(base)
    assert [one["name"] for one in classes] == [f"{base}/class{i}" for i in range(7)]
    assert {one["type"] for one in classes} == {"directory"}
    files = fs.ls(f"{base}/class3/")
    expected = [path for path in sorted(samples) if path.startswith(b"class3/")]
    assert [one["name"] for one in files] == [f"{base}/{path.decode()}" for path in expected]
    assert [one["size"] for one in files] == [len(samples[path]) for path in expected]
    assert files == [fs.info(one["name"]) for one in files]
    assert fs.ls(files[0]["name"]) == [files[0]]
    assert fs.isdir(f"{base}/class3")
    assert not fs.isfile(f"{base}/class3")
    assert fs.isfile(files[0]["name"])
    assert fs.created(base) == fs.modified(files[0]["name"])
    assert fs.info(base)["mtime"] == fs.created(base).timestamp()
    assert fs.created(base.removesuffix("/numbers")) <= fs.created(base)


def test_find_and_glob_agree_with_walking(fs, base, samples):
    walked = [f"{root}/{name}" for root, _, found in fs.walk(base) for name in found]
    assert fs.find(base) == sorted(walked) == names(samples, base)
    assert fs.find(base, detail=True) == {name: fs.info(name) for name in walked}
    assert fs.find(base, withdirs=True) == sorted([*walked, base, *fs.ls(base, detail=False)])
    assert fs.find(base, withdirs=True, detail=True) == {
        name: fs.info(name) for name in fs.find(base, withdirs=True)
    }
    assert fs.find(base, maxdepth=1) == []
    root = base.removesuffix("/numbers")
    assert fs.find(root) == [*fs.find(base), f"{root}/other/deep/er/two", f"{root}/other/one"]
    assert fs.find(f"{root}/other/one") == [f"{root}/other/one"]
    assert fs.find(f"{root}/other/one", detail=True) == {
        f"{root}/other/one": fs.info(f"{root}/other/one")
    }
    assert fs.glob(f"{base}/class[12]/*") == [
        name for name in walked if name.startswith((f"{base}/class1/", f"{base}/class2/"))
    ]
    assert fs.glob(f"{root}/*") == [base, f"{root}/other"]
    assert fs.glob(f"{root}/**/two") == [f"{root}/other/deep/er/two"]
    assert fs.du(base) == sum(map(len, samples.values()))


def test_every_directory_is_found_once():
    found = list(directories(["r/a/b/1", "r/a/b/2", "r/a/c/1", "r/z"], "r"))
    assert sorted(found) == ["r", "r/a", "r/a/b", "r/a/c"]


def test_what_is_not_there(fs, base, tmp_path):
    for path in (
        f"{base}/class9",
        f"{base}/class1/none",
        f"{base}/class1/00001/below",
        f"{base}x/class1",
        f"{base}@2/class1",
        f"{tmp_path}/none.img!/numbers",
        "numbers/class1",
    ):
        for ask in (fs.info, fs.ls, fs.cat_file, fs.open, fs.created):
            with pytest.raises(FileNotFoundError) as raised:
                ask(path)
            assert raised.value.errno == errno.ENOENT
            assert raised.value.filename == path
        assert not fs.exists(path)
        assert not fs.isdir(path)
        assert not fs.isfile(path)
        assert fs.find(path) == []
        assert fs.find(path, detail=True) == {}
    for ask in (fs.cat_file, fs.open):
        with pytest.raises(IsADirectoryError):
            ask(f"{base}/class1")


def test_what_cannot_be_told_is_not_a_no(fs, tmp_path):
    (tmp_path / "noise.img").write_bytes(bytes(1 << 20))
    with pytest.raises(dlfs.FormatError):
        fs.exists(f"{tmp_path}/noise.img!/numbers")


def test_names_that_are_not_utf8(fs, make_volume):
    path = make_volume(odd={b"a/\xff!/b": b"1", b"a/!": b"2", b"\xe4": b"3"})
    base = f"{path}!/odd"
    assert len(fs.find(base)) == 3
    assert [fs.cat_file(name) for name in fs.find(base)] == [b"2", b"1", b"3"]
    assert sorted(fs.cat(f"{base}/a", recursive=True).values()) == [b"1", b"2"]


# ---- reading -------------------------------------------------------------------------------------


def test_files_are_samples(fs, base, samples):
    path, data = next((path, data) for path, data in sorted(samples.items()) if len(data) > 100)
    with fs.open(f"{base}/{path.decode()}") as opened:
        assert isinstance(opened, io.IOBase)
        assert opened.readable()
        assert opened.seekable()
        assert not opened.writable()
        assert (opened.size, opened.mode) == (len(data), "rb")
        assert opened.read(10) == data[:10]
        assert opened.seek(-5, os.SEEK_END) == len(data) - 5
        assert opened.read() == data[-5:]
        opened.seek(7)
        again = pickle.loads(pickle.dumps(opened))
        assert again.read() == data[7:]
        assert again.info() == opened.info()
        with pytest.raises(OSError, match="Read-only") as raised:
            opened.write(b"x")
        assert raised.value.errno == errno.EROFS
    assert fs.head(f"{base}/{path.decode()}", 3) == data[:3]
    assert fs.tail(f"{base}/{path.decode()}", 3) == data[-3:]


@pytest.mark.parametrize(
    ("start", "end"), [(None, None), (0, 5), (5, None), (None, -5), (-9, -2), (3, 3), (9**9, None)]
)
def test_ranges(fs, base, samples, start, end):
    paths = sorted(samples)[:40]
    urls = [f"{base}/{path.decode()}" for path in paths]
    expected = [samples[path][start:end] for path in paths]
    assert [fs.cat_file(url, start, end) for url in urls] == expected
    assert fs.cat_ranges([*urls, urls[0]], start, end) == [*expected, expected[0]]
    count = len(urls)
    assert fs.cat_ranges(urls, [start] * count, [end] * count) == expected
    with pytest.raises(ValueError, match="as many starts"):
        fs.cat_ranges(urls, [start], end)


def test_many_files_are_one_batch(volume_path, samples, reads):
    fs = fsspec.filesystem("dlfs", volume=str(volume_path))
    everything = fs.cat("numbers", recursive=True)
    assert everything == {name: samples[name[8:].encode()] for name in names(samples, "numbers")}
    assert fs.cat(["other/one", "numbers/class0/00000"]) == {
        "other/one": b"1",
        "numbers/class0/00000": samples[b"class0/00000"],
    }
    assert len(fs.cat("numbers/class1/*")) == sum(p.startswith(b"class1/") for p in samples)
    assert reads == [COUNT, 1, 1, len(fs.ls("numbers/class1"))]


def test_batches_are_of_bounded_size():
    places = [(position, position + 100) for position in range(10)]
    parts = list(group_by_bytes(places, [BATCH_BYTES // 4 + 1] * len(places), BATCH_BYTES))
    assert [place for part in parts for place in part] == places
    assert max(map(len, parts)) == 4
    assert list(group_by_bytes([], [], BATCH_BYTES)) == []


def test_errors_of_single_files(fs, base):
    good, absent, directory = f"{base}/class0/00000", f"{base}/none", f"{base}/class1"
    paths = [good, absent, directory]
    data = fs.cat_file(good)
    with pytest.raises(FileNotFoundError):
        fs.cat([good, absent])
    with pytest.raises(IsADirectoryError):
        fs.cat([good, directory])
    assert fs.cat(paths, on_error="omit") == {good: data}
    returned = fs.cat(paths, on_error="return")
    assert isinstance(returned[absent], FileNotFoundError)
    assert isinstance(returned[directory], IsADirectoryError)
    got = fs.cat_ranges(paths, 0, 4)
    assert got[0] == data[:4]
    assert [type(one) for one in got[1:]] == [FileNotFoundError, IsADirectoryError]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 4, on_error="raise")


def test_a_damaged_sample_gives_no_bytes(fs, make_volume):
    path = make_volume(data={"good": b"g" * 5000, "bad": b"b" * 5000})
    with dlfs.open(str(path)) as volume, volume["data"] as dataset:
        offset = dataset.stat(dataset.index("bad")).offset_bytes
    write_at(path, offset + 4999, b"x")
    base = f"{path}!/data"
    for read in (fs.cat_file, lambda path: fs.open(path).read()):
        with pytest.raises(dlfs.ChecksumError, match="bad"):
            read(f"{base}/bad")
    with pytest.raises(dlfs.ChecksumError):
        fs.cat(base, recursive=True)
    got = fs.cat([f"{base}/bad", f"{base}/good"], on_error="return")
    assert got[f"{base}/good"] == b"g" * 5000
    assert isinstance(got[f"{base}/bad"], dlfs.ChecksumError)
    assert fs.exists(f"{base}/bad")


def test_ranges_of_a_large_file_cost_the_chunks_that_they_lie_in(fs, make_volume):
    data = os.urandom(4 << 20)
    path = f"{make_volume(data={'large': data})}!/data/large"
    dataset, _ = fs.find_sample(path)
    assert fs.cat_file(path, 1 << 20, (1 << 20) + 5) == data[1 << 20 : (1 << 20) + 5]
    assert fs.cat_ranges([path, path], [-9, 3], [None, 9]) == [data[-9:], data[3:9]]
    with fs.open(path) as opened:
        opened.seek(2 << 20)
        assert opened.read(100) == data[2 << 20 : (2 << 20) + 100]
    assert dataset.session.reader.stats()["read_bytes"] < len(data) // 2
    with fs.open(path) as opened:
        assert opened.read(9) + opened.read() == data
        assert opened.seek(len(data) + 5) == len(data) + 5
        assert opened.read() == b""
        with pytest.raises(OSError, match="Invalid argument"):
            opened.seek(-1)


def test_a_failed_read_is_no_end_of_the_file(fs, base, samples, monkeypatch):
    path, data = next((path, data) for path, data in sorted(samples.items()) if data)
    with fs.open(f"{base}/{path.decode()}") as opened, monkeypatch.context() as patched:

        def fail(_dataset: dlfs.Dataset, _index: int) -> bytes:
            raise dlfs.DeviceTimeoutError("a device does not answer")

        patched.setattr(dlfs.Dataset, "__getitem__", fail)
        with pytest.raises(dlfs.DeviceTimeoutError):
            opened.read()
        patched.undo()
        assert opened.read() == data


# ---- the rest of a file system -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rmdir", ("PATH",)),
        ("rm", ("PATH",)),
        ("rm_file", ("PATH",)),
        ("touch", ("PATH",)),
        ("copy", ("PATH", "PATH2")),
        ("cp_file", ("PATH", "PATH2")),
        ("mv", ("PATH", "PATH2")),
        ("open", ("PATH", "ab")),
        ("open", ("PATH", "r+b")),
    ],
)
def test_changes_are_refused(fs, base, name, arguments):
    path = f"{base}/class0/00000"
    given = [one.replace("PATH", path) if isinstance(one, str) else one for one in arguments]
    with pytest.raises(OSError, match="Read-only") as raised:
        getattr(fs, name)(*given)
    assert raised.value.errno == errno.EROFS
    assert fs.exists(path)


def test_instances_and_pickles(volume_path):
    one = fsspec.filesystem("dlfs", volume=str(volume_path))
    assert fsspec.filesystem("dlfs", volume=str(volume_path)) is one
    loaded = pickle.loads(pickle.dumps(one))
    assert loaded == one
    assert loaded.cat("other/one") == b"1"
    assert DlfsFileSystem.from_json(one.to_json()) == one
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(lambda: fsspec.filesystem("dlfs", volume=str(volume_path))).result()
    assert other is not one
    assert other.cat("other/one") == one.cat("other/one") == b"1"
    assert other._opened[str(volume_path)] is one._opened[str(volume_path)]


def read_all(fs: DlfsFileSystem, base: str, queue) -> None:
    queue.put(fs.cat(base, recursive=True))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(fs, base, method):
    expected = fs.cat(base, recursive=True)
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=read_all, args=(fs, base, queue))
    process.start()
    got = queue.get()
    process.join(30)
    assert process.exitcode == 0
    assert got == expected == fs.cat(base, recursive=True)


def test_new_versions(fs, make_volume):
    path = make_volume(data={"a": b"1"})
    base = f"{path}!/data"
    assert fs.cat_file(f"{base}/a") == b"1"
    tag = fs.info(f"{base}/a")["ETag"]
    with dlfs.open(str(path)) as volume:
        with volume.writer("data") as writer:
            writer.add("a", b"2")
        with volume.writer("more") as writer:
            writer.add("a", b"3")
    assert fs.cat_file(f"{base}/a") == b"1"
    assert fs.cat_file(f"{path}!/more/a") == b"3"
    fs.invalidate_cache()
    assert fs.cat_file(f"{base}/a") == fs.cat_file(f"{base}@2/a") == b"2"
    assert fs.cat_file(f"{base}@1/a") == b"1"
    assert fs.info(f"{base}/a")["ETag"] != tag
    assert fs.find(f"{base}@1") == [f"{base}@1/a"]


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.spec", None)
    monkeypatch.delitem(sys.modules, "dlfs.adapters.fsspec")
    with pytest.raises(dlfs.UsageError, match=re.escape(install_command("fsspec"))):
        importlib.import_module("dlfs.adapters.fsspec")


# ---- what reads through it -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(make_volume) -> Path:
    """A volume with Parquet and CSV files, and with images in class folders."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    from PIL import Image

    files: dict[str, bytes] = {}
    for part in range(2):
        rows = range(part * 100, part * 100 + 100)
        table = pa.table({"number": list(rows), "text": [f"row {row}" for row in rows]})
        stream = io.BytesIO()
        pq.write_table(table, stream, row_group_size=30)
        files[f"train/{part}.parquet"] = stream.getvalue()
    files["plain.csv"] = b"a,b\n1,2\n3,4\n"
    images: dict[str, bytes] = {}
    for number in range(12):
        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(stream, "png")
        images[f"{('cat', 'dog')[number % 2]}/{number:02}.png"] = stream.getvalue()
    path: Path = make_volume(tables=files, photos=images)
    return path


def test_pandas(tables):
    pandas = pytest.importorskip("pandas", reason="no pandas")
    url = f"dlfs://{tables}!/tables"
    assert pandas.read_csv(f"{url}/plain.csv")["b"].tolist() == [2, 4]
    frame = pandas.read_parquet(f"{url}/train/1.parquet")
    assert frame["number"].tolist() == list(range(100, 200))
    options = {"volume": str(tables)}
    same = pandas.read_parquet("dlfs://tables/train/1.parquet", storage_options=options)
    assert same.equals(frame)


def test_pyarrow(fs, tables):
    pytest.importorskip("pyarrow", reason="no pyarrow")
    import pyarrow.dataset
    import pyarrow.fs
    import pyarrow.parquet as pq

    base = f"{tables}!/tables/train"
    wrapped = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))
    (one, two) = wrapped.get_file_info(pyarrow.fs.FileSelector(base))
    assert (one.base_name, two.is_file) == ("0.parquet", True)
    assert wrapped.get_file_info(f"{base}/none").type == pyarrow.fs.FileType.NotFound
    assert pq.read_table(f"{base}/0.parquet", filesystem=wrapped).num_rows == 100
    found = pyarrow.dataset.dataset(base, filesystem=fs)
    assert found.to_table(filter=pyarrow.dataset.field("number") >= 150).num_rows == 50


@pytest.fixture
def hugging_face(monkeypatch, tmp_path):
    """Hugging Face ``datasets``, which counts nothing, with its caches in a temporary directory."""
    datasets = pytest.importorskip("datasets", reason="no datasets (pip install datasets)")
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that outlives the test
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / name))
    yield datasets
    gc.collect()  # pyarrow's readers must be gone before Python ends, or it aborts (arrow #45214)


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_parquet(hugging_face, tables, streaming):
    loaded = hugging_face.load_dataset(
        "parquet",
        data_files={"train": f"dlfs://{tables}!/tables/train/*.parquet"},
        split="train",
        streaming=streaming,
    )
    assert [row["number"] for row in loaded] == list(range(200))


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_image_folder(hugging_face, tables, streaming):
    loaded = hugging_face.load_dataset(
        "imagefolder",
        data_files=f"dlfs://{tables}!/photos/**",
        drop_labels=False,
        split="train",
        streaming=streaming,
    )
    rows = list(loaded)
    names = loaded.features["label"].names
    assert names == ["cat", "dog"]
    got = {row["image"].getpixel((0, 0))[0]: names[row["label"]] for row in rows}
    assert got == {number * 20: ("cat", "dog")[number % 2] for number in range(12)}


def test_hugging_face_takes_the_volume_as_an_option(hugging_face, tables):
    loaded = hugging_face.load_dataset(
        "csv",
        data_files="dlfs://tables/plain.csv",
        split="train",
        storage_options={"volume": str(tables)},
    )
    assert loaded["a"][:] == [1, 3]


def test_hugging_face_loads_what_it_saved(hugging_face, make_volume, tmp_path):
    hugging_face.Dataset.from_dict({"x": list(range(50))}).save_to_disk(tmp_path / "saved")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    path = make_volume(saved=files)
    loaded = hugging_face.load_from_disk(f"dlfs://{path}!/saved")
    assert loaded["x"][:] == list(range(50))


@pytest.mark.parametrize("value", ["omitt", None, 1, ["omit"]])
def test_a_policy_that_there_is_not_is_refused(fs, base, value):
    with pytest.raises(dlfs.UsageError, match="on_error 'raise', 'omit' or 'return', got"):
        fs.cat([base], on_error=value)
    with pytest.raises(dlfs.UsageError, match="on_error 'raise' or 'return', got"):
        fs.cat_ranges([base], 0, 4, on_error=value)
