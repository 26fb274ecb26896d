"""Several folders and files as one source: paths, clashes, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlfs.errors import FormatError, LimitError, NotFoundError, UsageError
from dlfs.ingest.importer import open_source
from tests.support.files import write_files
from tests.unit.ingest.taking import take as take_all

Taken = dict[bytes, bytes]


def take(*paths: object, layout: str = "path", **options: object) -> Taken:
    source = open_source([str(path) for path in paths], **options)  # type: ignore[arg-type]
    got = take_all(source, layout=layout, seed=1)  # type: ignore[arg-type]
    assert source.sample_count == len(got)
    return {os.fsencode(path): data for path, (data, _) in got.items()}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_files(
        tmp_path,
        {
            "one/cat/1": b"1",
            "one/dog": b"dog",
            "two/1": b"22",
            "deep/er/two/2": b"333",
            "readme.md": b"read me",
            "deep/notes": b"notes",
        },
    )
    return tmp_path


@pytest.mark.parametrize("layout", ["path", "shuffled"])
def test_paths_begin_with_the_names_of_folders_and_files(tree: Path, layout: str) -> None:
    found = take(tree / "two", tree / "one", tree / "readme.md", layout=layout)
    assert found == {
        b"one/cat/1": b"1",
        b"one/dog": b"dog",
        b"two/1": b"22",
        b"readme.md": b"read me",
    }
    if layout == "path":
        assert list(found) == sorted(found)


def test_one_folder_begins_below_it(tree: Path) -> None:
    assert set(take(tree / "one")) == {b"cat/1", b"dog"}


def test_folders_of_one_name_are_joined(tree: Path) -> None:
    found = take(tree / "two", tree / "deep/er/two")
    assert found == {b"two/1": b"22", b"two/2": b"333"}
    (tree / "empty/two").mkdir(parents=True)
    source = open_source([tree / "two", tree / "empty/two"])
    assert (source.sample_count, source.empty_directories) == (1, [b"two"])
    source.close()


def test_two_samples_of_one_path_name_both_sources(tree: Path) -> None:
    write_files(tree, {"deep/er/two/1": b"clash", "other/readme.md": b"", "more/two": b"a file"})
    with pytest.raises(FormatError, match=r"got two/1 in .*/two and in .*/deep/er/two"):
        take(tree / "two", tree / "deep/er/two")
    with pytest.raises(
        FormatError, match=r"got readme\.md in .*/readme\.md and in .*/other/readme"
    ):
        take(tree / "readme.md", tree / "other/readme.md", tree / "one")
    with pytest.raises(FormatError, match=r"got two in .*/more/two and in .*/two$"):
        take(tree / "two", tree / "more/two")
    with pytest.raises(FormatError, match=r"got one/cat/1 in .*/one and in .*/one"):
        take(tree / "one", tree / "one")


def test_patterns_and_relative_names(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(take(tree / "{one,two}")) == {b"one/cat/1", b"one/dog", b"two/1"}
    monkeypatch.chdir(tree / "one")
    assert set(take(".", "../two/")) == {b"one/cat/1", b"one/dog", b"two/1"}
    assert set(take("cat/..", "../two")) == {b"one/cat/1", b"one/dog", b"two/1"}


def test_links_are_treated_as_in_one_folder(tree: Path) -> None:
    (tree / "one/link").symlink_to("dog")
    (tree / "alias").symlink_to("two")
    (tree / "file").symlink_to("readme.md")
    found = take(tree / "one", tree / "alias", tree / "file")
    assert (found[b"one/link"], found[b"alias/1"], found[b"file"]) == (b"dog", b"22", b"read me")
    found = take(tree / "one", tree / "alias", options={"links": "skip"})
    assert set(found) == {b"one/cat/1", b"one/dog", b"alias/1"}
    with pytest.raises(UsageError, match=r"one/link: expected no symbolic links"):
        take(tree / "one", tree / "two", options={"links": "error"})


def test_files_of_known_formats_are_samples_on_request(tree: Path) -> None:
    write_files(tree, {"a.csv": b"x,y", "b.tar": b"no archive"})
    found = take(tree / "a.csv", tree / "b.tar", format_name="folder")
    assert found == {b"a.csv": b"x,y", b"b.tar": b"no archive"}


def test_what_cannot_be_read_is_refused(tree: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing: there is no such file or folder"):
        take(tree / "one", tree / "nothing")
    os.mkfifo(tree / "pipe")
    with pytest.raises(UsageError, match="pipe: expected a file or a folder"):
        take(tree / "one", tree / "pipe", format_name="folder")
    long = "/".join(["x" * 250] * 16)
    deep = os.open(tree / "one", os.O_RDONLY)
    try:
        for part in long.split("/"):
            os.mkdir(part, dir_fd=deep)
            following = os.open(part, os.O_RDONLY, dir_fd=deep)
            os.close(deep)
            deep = following
        os.close(os.open("y" * 200, os.O_CREAT | os.O_WRONLY, dir_fd=deep))
    finally:
        os.close(deep)
    with pytest.raises(LimitError):
        take(tree / "one", tree / "two")
