"""Tests of sources that a separate process reads: what it gives, and every way in which it ends."""

from __future__ import annotations

import gc
import os
import pickle
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from dlfs.cli.commands import app
from dlfs.errors import DeviceError, DlfsError, FormatError, LimitError
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.isolation import source as isolation
from dlfs.ingest.isolation.messages import Array, End, Failure, decode, encode
from dlfs.ingest.isolation.process import TAIL_BYTES, IsolatedProcess, StderrTail
from dlfs.ingest.isolation.source import IsolatedSource
from dlfs.ingest.registry import FORMATS
from dlfs.ingest.source import SampleBlock
from dlfs.volume.volume import Volume
from tests.support.scripts import hear, running
from tests.unit.ingest.array_writers import write_hdf5
from tests.unit.ingest.isolation.failing_source import BLOCKS, ROWS, FailingOptions, block
from tests.unit.ingest.taking import contents, import_by_command, refused


@pytest.fixture(autouse=True)
def finds_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process import the tests' own source."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))


def samples(found: SampleBlock) -> list[bytes]:
    spans = zip(found.offsets.tolist(), found.lengths.tolist(), strict=True)
    return [found.data[at : at + size].tobytes() for at, size in spans]


def test_blocks_are_those_of_the_source() -> None:
    source = IsolatedSource(FailingOptions("not"), ["a.h5"])
    assert (source.name, source.sample_count) == ("a.h5", ROWS * BLOCKS)
    for seed in (1, 2):
        for number, found in enumerate(source.blocks(layout="path", seed=seed)):
            expected = block(number, f"path{seed}")
            assert found.paths == expected.paths
            assert samples(found) == samples(expected)
            for name, values in expected.attributes.items():
                assert np.array_equal(found.attributes[name], values)
                assert found.attributes[name].dtype == values.dtype
        assert source.skipped == {"thing": BLOCKS - 1}
    source.close()
    source.close()


def test_a_dataset_is_imported_whole(volume: Volume) -> None:
    source = IsolatedSource(FailingOptions("not"), ["a.h5"])
    import_dataset(volume, source, "n")
    source.close()
    expected = {}
    for number in range(BLOCKS):
        made = block(number, "")
        expected |= dict(zip([path.decode() for path in made.paths], samples(made), strict=True))
    assert contents(volume, "n") == expected


@pytest.mark.parametrize("when", ["open", "blocks"])
@pytest.mark.parametrize(
    ("how", "kind", "match"),
    [
        ("crash", FormatError, "expected a readable file, got the end of .*, by SIGSEGV"),
        ("exit", FormatError, "got the end of .*, by code 7 .library: last words"),
        ("chatty", FormatError, "got the end of .*, by code 7 .library: last words"),
        ("pickle", FormatError, "sends what it should not: "),
        ("error", DeviceError, "it failed"),
        ("odd", FormatError, "expected a readable file, got KeyError: .a library.s own"),
        ("memory", FormatError, "expected a readable file, got .*MemoryError.*Unable to allocate"),
        ("hang", DeviceError, "no answer for 2 s"),
    ],
)
def test_a_failure_names_file_and_part(
    volume: Volume,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    when: str,
    kind: type[DlfsError],
    match: str,
) -> None:
    if how == "hang":
        monkeypatch.setattr(isolation, "ANSWER_SECONDS", 2)
    part = {"open": ": the header: ", "blocks": r": x, rows 3\.\.5: "}[when]
    part = ": " if how == "error" else part
    with refused(volume, kind, rf"^import a\.h5{part}.*{match}"):
        source = IsolatedSource(FailingOptions(how, when), ["a.h5"])
        try:
            import_dataset(volume, source, "n")
        finally:
            source.close()


def test_messages_keep_texts_and_arrays_and_run_nothing() -> None:
    arrays = [
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array(["a", "\udcff", ""], object),
        np.array(["2020-01-01"], "M8[s]"),
        np.array([], "U3"),
    ]
    for array in arrays:
        made = Array.of(array).array()
        assert made.dtype == array.dtype
        assert np.array_equal(made, array)
    error = Failure.of(LimitError("caf\udce9"), "here").error()
    assert (type(error), str(error)) == (LimitError, "caf\udce9")
    for data in (pickle.dumps(("ok", None)), encode(End())[:-1], b""):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)
    for dtype, shape, content in (("O", (1,), b"1"), ("i4", (2,), b"1234"), ("x", (), b"")):
        with pytest.raises((ValueError, TypeError)):
            Array(dtype, shape, content).array()


def test_stderr_is_read_and_only_its_end_is_kept() -> None:
    readable, writable = os.pipe()
    tail = StderrTail(readable)
    for number in range(100):
        os.write(writable, b"%d\n" % number + b"x" * 50_000)
        tail.take()
    os.write(writable, b"\nlast\n\n")
    os.close(writable)
    assert tail.last_line() == "last"
    assert len(tail._tail) == TAIL_BYTES
    tail.take()
    assert not tail.is_open
    tail.close()
    tail.close()


def test_errors_keep_notes_and_codes() -> None:
    with pytest.raises(DeviceError) as caught:
        IsolatedSource(FailingOptions("error", "open"), ["a.h5"])
    assert caught.value.errno == 5
    assert caught.value.__notes__ == ["a note"]


def test_memory_that_a_file_needs_is_allowed() -> None:
    source = IsolatedSource(FailingOptions("allowed", "open"), ["a.h5"])
    source.close()


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(2):
        source = IsolatedSource(FailingOptions("not"), ["a.h5"])
        blocks = source.blocks(layout="path", seed=0)
        next(blocks)
        blocks.close()
        source.close()
        with pytest.raises(FormatError):
            IsolatedSource(FailingOptions("crash", "open"), ["a.h5"])
    del blocks
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_process_ends_with_its_caller() -> None:
    script = (
        "import sys\n"
        "from dlfs.ingest.isolation.source import IsolatedSource\n"
        "from tests.unit.ingest.isolation.failing_source import FailingOptions\n"
        "source = IsolatedSource(FailingOptions('not'), ['a.h5'])\n"
        "print(source._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with running(script) as caller:
        descriptor = os.pidfd_open(int(hear(caller)))
        caller.kill()
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


@pytest.mark.isolated
def test_the_command_starts_one_process_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hdf5(tmp_path / "a.h5", {"x": np.ones((3, 4))})
    started: list[IsolatedProcess] = []
    start = IsolatedProcess.__init__

    def note(made: IsolatedProcess) -> None:
        start(made)
        started.append(made)

    monkeypatch.setattr(IsolatedProcess, "__init__", note)
    assert len(import_by_command(tmp_path, f"{tmp_path}/a.h5 V")) == 3
    done = CliRunner().invoke(
        app, ["import", f"{tmp_path}/a.h5", f"{tmp_path}/none", "--name", "n"]
    )
    assert done.exit_code != 0
    assert [made.process.poll() is None for made in started] == [False, False]


def test_the_process_loads_no_more_than_it_needs() -> None:
    """Every import of a table or an array waits for it."""
    script = (
        "import sys\n"
        "import dlfs.ingest.isolation.worker, dlfs.ingest.formats.hdf5.source\n"
        "import dlfs.ingest.formats.arrow\n"
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    loaded = set(done.stdout.decode().split())
    others = {"block", "directory", "reader", "store", "volume", "cli", "attributes", "fabric"}
    assert not loaded & {f"dlfs.{name}" for name in others}
    assert not loaded & {"h5py", "pyarrow", "torch"}


def test_formats_whose_libraries_can_crash_are_isolated() -> None:
    isolated = {row.name for row in FORMATS if row.isolated}
    tables = {"parquet", "arrow", "huggingface", "jsonl"}
    assert isolated == {*tables, "arrayrecord", "hdf5", "netcdf", "zarr", "adios2"}
