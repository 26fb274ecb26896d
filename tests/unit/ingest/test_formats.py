"""The table of formats: what is recognised, how options are read, what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from dlfs.base.extras import load_package
from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.ingest import registry as formats
from dlfs.ingest.archives import archive
from dlfs.ingest.importer import open_source
from dlfs.ingest.registry import (
    FORMATS,
    Format,
    describe_options,
    find_format,
    make_options,
    options_class,
    parse_settings,
    recognise,
)


@dataclass(frozen=True)
class SomeOptions:
    """An option of each type."""

    text: Annotated[str, "some text"] = "x"
    maybe: Annotated[str | None, "perhaps some text"] = None
    count: Annotated[int, "a number"] = 1
    scale: Annotated[float, "another number"] = 1.0
    flag: Annotated[bool, "or not"] = False
    choice: Annotated[Literal["a", "b"], "one of two"] = "a"
    names: Annotated[tuple[str, ...], "some names"] = ()

    def open(self, paths):
        raise NotImplementedError


SOME = Format(name="some", summary="", opener=f"{__name__}:SomeOptions")


@pytest.fixture(autouse=True)
def _this_module(monkeypatch) -> None:
    """Test modules are imported by their files: a row cannot name one."""
    monkeypatch.setattr(
        formats, "options_class", lambda row: SomeOptions if row is SOME else options_class(row)
    )


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_every_row_leads_to_a_class_whose_options_have_help(row: Format) -> None:
    assert callable(options_class(row).open)
    assert make_options(row, {}) == options_class(row)()
    for found in describe_options(row):
        assert found.text
        assert found.type
    assert find_format(row.name) is row
    assert all(pattern == pattern.lower() for pattern in row.names)


def test_names_of_formats_and_their_patterns_are_of_one_row_each() -> None:
    names = [row.name for row in FORMATS]
    assert len(set(names)) == len(names)
    patterns = [pattern for row in FORMATS for pattern in row.names]
    assert len(set(patterns)) == len(patterns)


def test_archives_are_recognised_by_the_names_they_are_read_by() -> None:
    assert find_format("tar").names == tuple("*" + suffix for suffix in archive._SUFFIXES)


def test_text_is_read_by_the_options_type() -> None:
    texts = ["text=a=b", "maybe=y", "count=-3", "scale=0.5", "flag=yes", "choice=b"]
    read = make_options(SOME, parse_settings([*texts, "names=p, q", "names=r"]))
    assert read == SomeOptions("a=b", "y", -3, 0.5, True, "b", ("p", "q", "r"))
    assert make_options(SOME, parse_settings(["maybe=none", "flag=no"])) == SomeOptions()
    shapes = make_options(SOME, parse_settings(["names=a:<f4[?,3],b:u1[],c[0],d"]))
    assert shapes == SomeOptions(names=("a:<f4[?,3]", "b:u1[]", "c[0]", "d"))


def test_values_are_taken_typed() -> None:
    values = {"maybe": None, "count": 2, "flag": True, "choice": "b", "names": ["p", "q"]}
    assert make_options(SOME, values) == SomeOptions(
        count=2, flag=True, choice="b", names=("p", "q")
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nothing": 1}, "format some takes no option 'nothing'; it takes text, maybe, count"),
        ({"count": "many"}, "option count of format some: expected a whole number, got 'many'"),
        ({"count": True}, "expected a whole number, got True"),
        ({"scale": "wide"}, "expected a number, got 'wide'"),
        ({"flag": "perhaps"}, "expected yes or no, got 'perhaps'"),
        ({"choice": "c"}, r"expected one of a, b, got 'c'"),
        ({"names": [1]}, "expected names, got"),
        ({"text": 5}, "expected TEXT, got 5"),
    ],
)
def test_what_an_option_does_not_take_is_reported(values, message) -> None:
    with pytest.raises(UsageError, match=message):
        make_options(SOME, values)


@pytest.mark.parametrize("text", ["flag", "=yes", " =yes"])
def test_settings_have_a_name_and_a_value(text) -> None:
    with pytest.raises(UsageError, match="expected an option NAME=VALUE"):
        parse_settings([text])


def test_an_unknown_format_is_reported(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"expected a format of auto, .*, got 'floppy'"):
        open_source(tmp_path, format_name="floppy")
    with pytest.raises(UsageError, match="format folder takes no option 'prefix_shards'"):
        open_source(tmp_path, options={"prefix_shards": True})
    with pytest.raises(UsageError, match="expected a source, got none"):
        open_source([])


def test_formats_are_recognised(tmp_path, monkeypatch) -> None:
    marked = Format(name="marked", summary="", opener="", marks=("*.m", "index"))
    magic = Format(name="magic", summary="", opener="", magic=((3, b"here"), (0, b"there")))
    named = Format(name="named", summary="", opener="", names=("*.one", "two-*"))
    monkeypatch.setattr(formats, "FORMATS", (marked, magic, named, *FORMATS))
    for name in ("half/x.m", "whole/x.m", "whole/index", "a.One", "two-1"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "b").write_bytes(b"...here")
    (tmp_path / "c").write_bytes(b"there")
    for name, row in [
        ("half", find_format("folder")),
        ("whole", marked),
        ("a.One", named),
        ("two-1", named),
        ("b", magic),
        ("c", magic),
    ]:
        assert recognise([str(tmp_path / name)]) is row
    with pytest.raises(UsageError, match=r"expected the format of .*a.One, named, got magic"):
        recognise([str(tmp_path / "a.One"), str(tmp_path / "b")])


@pytest.mark.parametrize(
    ("name", "what", "instead"),
    [
        ("brain.nii.gz", "a NIfTI volume", "read it with nibabel and add arrays by volume.writer"),
        ("SCAN.DCM", "a DICOM file", "read it with pydicom and add arrays by volume.writer"),
        ("clip.mp4", "a video", "decode its frames and add them by volume.writer"),
        ("model.pt", "a pickle, which can run any code", "add its values by volume.writer"),
        ("x.pkl", "a pickle, which can run any code", "load it where you trust it"),
        ("x.json", "JSON", r"jq -c '\.\[\]' makes JSON Lines.*--attributes"),
        ("x.rar", "an archive that is not read", "unpack it"),
        ("x.orc", "a table that is not read", "write it as Parquet"),
    ],
)
def test_a_file_of_another_format_is_refused_with_what_to_do(
    tmp_path: Path, name: str, what: str, instead: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"anything")
    message = f"{name}: expected a folder, or a file of a known format, got {what}.*{instead}"
    with pytest.raises(UsageError, match=message) as caught:
        open_source(path)
    named = re.search(r"docs/(\w+\.md), '(.*?)'", str(caught.value))
    if named:  # the page has the five lines
        page = (Path(__file__).parents[3] / "docs" / named[1]).read_text()
        assert f"\n### {named[2]}\n" in page
    for given in (tmp_path, [path, tmp_path]):  # a folder of such files, and --format folder
        source = open_source(given)
        assert source.sample_count == (1 if given == tmp_path else 2)
        source.close()
    source = open_source(path, format_name="folder")
    source.close()


def test_what_is_not_there_or_cannot_be_read_is_reported(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(NotFoundError, match="no such file or folder"):
        recognise([str(tmp_path / "nothing")])

    def fail(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", fail)
    with pytest.raises(DeviceError, match="Permission denied"):
        recognise([str(tmp_path)])


def test_a_missing_package_says_what_installs_it() -> None:
    with pytest.raises(UsageError, match=r"import x: expected nothing_such .*'h5py>=3.11'"):
        load_package("nothing_such.part", extra="science", what="import x")
    assert load_package("json.decoder", extra="", what="") is not None
