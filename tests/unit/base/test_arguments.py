"""Options of the wrong value or type are refused by name, whatever the type."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.arguments import check_choice, check_integer
from dlfs.errors import UsageError
from tests.support.volumes import new_volume, write_dataset

WRONG: list[Any] = ["", "chnk", "Global", 0, 1.5, True, b"chunk", [], {}, ("chunk",), np.zeros(2)]
"""No value of any option that takes words."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "shuffle": ("'global'", "'chunk'", "None"),
    "on_error": ("'raise'", "'skip'", "'replace'"),
    "plan": ("'auto'", "'direct'", "'chunks'", "'chunk_copy'"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = new_volume(tmp_path_factory.mktemp("arguments") / "volume.img", size_bytes=16 << 20)
    with dlfs.open(str(path)) as volume:
        write_dataset(volume, "small", {f"{number}": b"x" * number for number in range(10)})
        with volume["small"] as found:
            yield found


def names_all(error: UsageError, option: str, given: object) -> None:
    """Check that a refusal names the option, its values and the given value."""
    text = str(error)
    assert option in text
    assert all(word in text for word in OPTIONS[option])
    assert "got " in text
    assert "\n" not in text
    if isinstance(given, str | bytes | int | float):
        assert repr(given) in text


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_an_epoch_refuses_other_words(dataset, option, value):
    with pytest.raises(UsageError) as found:
        dataset.batches(2, **{option: value})
    names_all(found.value, option, value)


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_reads_and_sequences_refuse_other_words(dataset, value):
    with pytest.raises(UsageError) as found:
        dataset.read([0], on_error=value)
    names_all(found.value, "on_error", value)
    with pytest.raises(UsageError) as found:
        dataset.sequence(shuffle=value)
    names_all(found.value, "shuffle", value)
    with pytest.raises(UsageError) as found:
        dataset.batches(2, where=[1, 2], shuffle=value)
    names_all(found.value, "shuffle", value)


def test_the_words_allowed_are_allowed(dataset):
    for plan in ("auto", "direct", "chunks", "chunk_copy"):
        with dataset.batches(2, plan=plan) as epoch:
            assert len(list(epoch)) == 5
    assert len(dataset.batches(2, shuffle=np.str_("chunk"))) == 5  # a str, too


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("uri", ["mem:arguments-engine?size=1MiB", "nothing.img"])
def test_open_refuses_other_engines(uri, value):
    with pytest.raises(UsageError, match=r"expected engine 'auto', 'uring' or 'threads', got"):
        dlfs.open(uri, engine=value)


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_writer_refuses_other_layouts(tmp_path, value):
    path = new_volume(str(tmp_path / "volume.img"), size_bytes=16 << 20)
    with dlfs.open(path) as volume, pytest.raises(UsageError, match=r"layout 'path' or 'shuffled'"):
        volume.writer("new", layout=value)


def test_a_near_miss_is_named():
    with pytest.raises(UsageError) as found:
        check_choice("CHUNKS", ("global", "chunk", None), option="shuffle", action="order")
    assert str(found.value) == (
        "order: expected shuffle 'global', 'chunk' or None, got 'CHUNKS'; did you mean 'chunk'?"
    )


def test_long_values_are_cut():
    with pytest.raises(UsageError) as found:
        check_choice("x" * 10_000, ("global",), option="shuffle", action="order")
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    "value", [True, np.True_, 1.0, "1", None, b"1", [1], np.array([1]), -1, 11, 2**200]
)
def test_integers_are_integers_in_range(value):
    with pytest.raises(UsageError, match=r"expected batch_size as an integer 0\.\.10, got"):
        check_integer(value, 0, 10, option="batch_size", action="take batches")


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7), np.array(7)])
def test_integers_of_numpy_are_integers(value):
    found = check_integer(value, 0, 10, option="batch_size", action="take batches")
    assert (type(found), found) == (int, 7)


def test_an_unknown_keyword_names_the_nearest_one(dataset, tmp_path):
    with pytest.raises(TypeError, match=r"Dataset\.batches\(\) got .* 'shufle'; .* 'shuffle'\?"):
        dataset.batches(2, shufle=None)
    with pytest.raises(TypeError, match=r"'fields'$"):
        dataset.sequence(fields=None)
    with pytest.raises(TypeError, match=r"length_batches\(\) got .*; did you mean 'max_samples'\?"):
        dlfs.length_batches(dataset, 100, max_sample=3)
    dlfs.format_volume(tmp_path / "volume.img", size_bytes=16 << 20)
    with dlfs.open(tmp_path / "volume.img") as volume:
        with pytest.raises(TypeError, match=r"Volume\.writer\(\) got .* mean 'layout'\?"):
            volume.writer("a", layuot="path")
        with pytest.raises(TypeError, match=r"Volume\.append\(\) got .* 'fields'$"):
            volume.append("a", fields={})
        volume.writer("a").abort()  # the volume is not locked


USER_CODE = """
    from typing import assert_type

    import dlfs

    def train(dataset: dlfs.Dataset, shuffle: dlfs.Shuffle | None, on_error: dlfs.OnError) -> None:
        plan: dlfs.ReadPlan = "chunks"
        with dataset.batches(8, shuffle=shuffle, on_error=on_error, plan=plan) as epoch:
            for batch in epoch:
                assert_type(batch, dlfs.Batch)
        dataset.sequence(shuffle="chunk")
        dataset.read([1, 2], on_error="skip")

    def store(uri: str, engine: dlfs.Engine, layout: dlfs.Layout) -> None:
        with dlfs.open(uri, engine=engine) as volume, volume.writer("new", layout=layout):
            pass
"""

WRONG_USER_CODE = """
    import dlfs

    def train(dataset: dlfs.Dataset) -> None:
        dataset.batches(8, shuffle="chnk")
        dataset.batches(8, plan="chunk")
        dataset.read([1], on_error="ignore")
        dataset.sequence(shuffle="none")
        dlfs.open("x", engine="io_uring")
"""


def type_check(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run mypy --strict on a user's file."""
    (folder / "user.py").write_text(textwrap.dedent(code))
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "user.py"]
    return subprocess.run(mypy, cwd=folder, capture_output=True, text=True, check=False)


def test_users_code_is_type_checked(tmp_path):
    done = type_check(tmp_path, USER_CODE)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
    wrong = type_check(tmp_path, WRONG_USER_CODE)
    lines = [line for line in wrong.stdout.splitlines() if "error:" in line]
    assert len(lines) == 5, wrong.stdout
    assert all("Literal[" in line for line in lines)
