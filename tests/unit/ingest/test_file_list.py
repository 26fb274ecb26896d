"""Lists of files: text, CSV and TSV, the types of their columns, and lines that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError, NotFoundError, UsageError
from dlfs.ingest.formats.file_list import ListOptions
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.volume.volume import Volume
from tests.support.files import write_files
from tests.unit.ingest.taking import import_all, import_by_command, refused, take

FILES = {f"d{i % 3}/{i}.jpg": b"%d" % i * i for i in range(50)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files, more than any list here names."""
    return write_files(tmp_path, FILES | {"d0/unlisted": b"?"})


def test_lines_are_paths_in_their_order(volume: Volume, folder: Path) -> None:
    names = list(FILES)[::-1]
    (folder / "all.txt").write_text("\n".join(names) + "\n\n")
    source = open_source(folder / "all.txt")
    assert (source.sample_count, source.sample_bytes) == (50, sum(map(len, FILES.values())))
    assert source.gives_shuffled
    got = take(source)
    assert list(got) == names
    assert got == {path: (data, {}) for path, data in FILES.items()}
    assert list(take(open_source(folder / "all.txt"), layout="shuffled", seed=1)) != names
    assert import_all(volume, folder / "all.txt") == FILES
    assert import_by_command(folder, f"{folder}/all.txt V") == FILES


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_columns_are_attributes(volume: Volume, folder: Path, suffix: str, delimiter: str) -> None:
    header = ["label", "path", "weight", "zip", "note"]
    rows = [
        [str(i - 9), path, "" if i == 7 else f"{i / 4}", f"{i:05d}", f'"a ""note""{delimiter}{i}"']
        for i, path in enumerate(FILES)
    ]
    path = folder / f"all{suffix}"
    path.write_text("\n".join(delimiter.join(row) for row in [header, *rows]))
    import_dataset(volume, open_source(path), "n")
    with volume["n"] as dataset:
        dtypes = {name: dtype.kind for name, dtype in dataset.columns.items()}
        assert dtypes == {"label": "i", "weight": "f", "zip": "O", "note": "O"}
        for index, name in enumerate(dataset.paths()):
            i = list(FILES).index(name.decode())
            assert dataset[index] == FILES[name.decode()]
            assert dataset.column("label", [index])[0] == i - 9
            weight = dataset.column("weight", [index])[0]
            assert np.isnan(weight) if i == 7 else weight == i / 4
            assert dataset.column("zip", [index])[0] == f"{i:05d}"
            assert dataset.column("note", [index])[0] == f'a "note"{delimiter}{i}'


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["1", "2.5", "-1e3"], [1.0, 2.5, -1000.0]),
        (["1", "", "nan"], [1.0, np.nan, np.nan]),
        (["007", "1", "2"], ["007", "1", "2"]),
        (["1", "two", ""], ["1", "two", ""]),
        (["", "", ""], ["", "", ""]),
        (["9223372036854775808", "1", "2"], ["9223372036854775808", "1", "2"]),
        (["1_000", "1", "2"], ["1_000", "1", "2"]),
    ],
)
def test_columns_get_the_narrowest_type(folder: Path, values: Any, want: Any) -> None:
    rows = [f"{path},{value}" for path, value in zip(FILES, values, strict=False)]
    (folder / "x.csv").write_text("\n".join(["file,a", *rows]))
    got = [attributes["a"] for _, attributes in take(open_source(folder / "x.csv")).values()]
    np.testing.assert_array_equal(got, want)
    assert [type(value) for value in got] == [type(value) for value in want]


def test_columns_and_the_root_are_chosen(folder: Path) -> None:
    (folder / "lists").mkdir()
    path = folder / "lists" / "x.csv"
    path.write_text("id,file,label\n7,d1/1.jpg,cat\n8,./d2//2.jpg,dog\n")
    options = {"root": str(folder), "path": "file", "attributes": "label"}
    assert take(open_source(path, options=options)) == {
        "d1/1.jpg": (b"1", {"label": "cat"}),
        "d2/2.jpg": (b"22", {"label": "dog"}),
    }


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("x.txt", "d1/1.jpg\n../x\n", FormatError, "line 2: expected a name without '..'"),
        ("x.txt", "/etc/passwd\n", FormatError, "line 1: expected a relative name"),
        ("x.txt", "d1/1.jpg\n\n./d1/1.jpg\n", FormatError, "line 3: expected each path once, got"),
        ("x.txt", ".\n", FormatError, "line 1: expected a path, got '.'"),
        ("x.txt", "a\0b\n", FormatError, "line 1: a"),
        ("x.txt", "n" * 300, LimitError, "line 1: nnn"),
        ("x.txt", "d1/1.jpg\nd1/gone.jpg\n", DeviceError, "d1/gone.jpg: "),
        ("x.txt", "d1\n", DeviceError, "d1: "),
        ("x.csv", "path,a\nd1/1.jpg\n", FormatError, "line 2: expected 2 values, got 1"),
        ("x.csv", "path,a\nd1/1.jpg,1,2\n", FormatError, "line 2: expected 2 values, got 3"),
        ("x.csv", "path,path\n", FormatError, "expected columns of different names"),
        ("x.csv", "", FormatError, "line 1: expected names of columns"),
        ("x.csv", 'path,a\nd1/1.jpg,"cut', FormatError, "line 2: unexpected end of data"),
        ("x.csv", "path,a\nd1/1.jpg,\udcff\n", FormatError, "column a: expected text in UTF-8"),
    ],
)
def test_lines_that_make_no_sense_are_reported(
    volume: Volume, folder: Path, name: str, text: str, error: type[DlfsError], message: str
) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with refused(volume, error, message):
        import_all(volume, folder / name)


def test_a_file_that_changes_is_reported(volume: Volume, folder: Path) -> None:
    (folder / "x.txt").write_text("d1/1.jpg\nd2/2.jpg\n")
    source = open_source(folder / "x.txt")
    (folder / "d2" / "2.jpg").write_bytes(b"other")
    with refused(volume, DeviceError, "d2/2.jpg: the file changed during the import"):
        import_dataset(volume, source, "n")


def test_links_are_followed_or_refused(folder: Path) -> None:
    (folder / "link").symlink_to("d1/1.jpg")
    (folder / "x.txt").write_text("link\n")
    assert take(open_source(folder / "x.txt")) == {"link": (b"1", {})}
    with pytest.raises(DeviceError, match="link: "):
        open_source(folder / "x.txt", options={"links": "error"})
    with pytest.raises(UsageError, match="expected one of follow, error"):
        open_source(folder / "x.txt", options={"links": "skip"})


def test_options_that_do_not_fit_are_reported(folder: Path) -> None:
    (folder / "x.csv").write_text("path,a\n")
    (folder / "x.txt").write_text("")
    with pytest.raises(UsageError, match="expected column b, got path, a"):
        open_source(folder / "x.csv", options={"attributes": "b"})
    with pytest.raises(UsageError, match=r"expected columns in a .csv or .tsv file"):
        open_source(folder / "x.txt", options={"path": "b"})
    with pytest.raises(NotFoundError, match="no such folder"):
        open_source(folder / "x.txt", options={"root": str(folder / "gone")})
    with pytest.raises(NotFoundError, match="no such file"):
        ListOptions().open([str(folder / "gone.txt")])
    with pytest.raises(UsageError, match="expected one list, got 2"):
        ListOptions().open(["a", "b"])
    with pytest.raises(DeviceError, match="directory"):
        ListOptions().open([str(folder)])
    for name in ("x.csv", "x.txt"):
        assert take(open_source(folder / name)) == {}
