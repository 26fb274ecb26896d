"""Profiles: what perf writes is read right, and a tiny run of it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.errors import Unavailable
from bench.machine import LIBDLFS
from bench.profile import report
from bench.profile.__main__ import main
from bench.profile.costs import Place, look_up, parse_perf
from bench.profile.groups import group_of
from bench.profile.recorders import Recording, perf_event
from bench.profile.workload import CASES, Done, scene_of
from dlfs.base.units import MIB

SIZE = 2 * MIB

PERF = """\
   77     333444
\tffffffff8134394d memcpy ([kernel.kallsyms])
\tffffffff8134394e fuse_dev_do_read ([fuse])
\t           fd001 read (/usr/lib/x86_64-linux-gnu/libc.so.6)

   77     333444
\t            1234 PyObject_Call+0x1 (/usr/bin/python3.11)
\t            9999 [unknown] ([unknown])

   78     333444
\t            1234 PyObject_Call+0x1 (/usr/bin/python3.11)

   77     333444
\t            1234 PyObject_Call+0x1 (/usr/bin/python3.11)

"""


def test_perf_samples_are_read() -> None:
    costs = parse_perf(PERF)
    python = Place(77, "python3.11", "", "PyObject_Call+0x1")
    kernel = Place(77, "kernel", "", "memcpy", ("fuse_dev_do_read",))
    assert costs == {
        kernel: 333_444,
        python: 666_888,
        Place(78, "python3.11", "", "PyObject_Call+0x1"): 333_444,
    }
    assert group_of(kernel) == "kernel: FUSE"
    assert group_of(python) == "Python: interpreter"


@pytest.mark.parametrize("text", ["python 1 2\n\t12 f (o)\n", "   7     8\n\tzz f (o)\n"])
def test_what_is_no_stack_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a stack"):
        parse_perf(text)


def test_a_sample_without_a_stack_is_counted() -> None:
    assert parse_perf("   7     8\n\n") == {Place(7, "unknown", "", "unknown"): 8}


@pytest.mark.parametrize(
    ("place", "group"),
    [
        (Place(1, "libdlfs.so", "crc32c.c", "crc_wide_any"), "libdlfs: CRC32C"),
        (Place(1, "libdlfs.so", "reader/plan.c", "plan_batch"), "libdlfs: planning"),
        (Place(1, "libdlfs.so", "device/uring.c", "submit"), "libdlfs: submission and completion"),
        (Place(1, "libdlfs.so", "nvme/queue.c", "submit"), "libdlfs: NVMe/TCP"),
        (Place(1, "libdlfs.so", "arena/arena.c", "arena_find"), "libdlfs: cache and memory"),
        (Place(1, "libdlfs.so", "", "unheard_of"), "libdlfs: other"),
        (Place(1, "libc.so.6", "", "__memmove_avx512_unaligned_erms"), "C library: copies"),
        (Place(1, "libc.so.6", "", "_int_malloc"), "C library: malloc"),
        (Place(1, "libc.so.6", "", "pthread_mutex_lock@@GLIBC_2.2.5"), "C library: locks"),
        (Place(1, "libc.so.6", "", "qsort"), "C library"),
        (Place(1, "_ctypes.cpython-311-x86_64-linux-gnu.so", "", "f"), "Python: ctypes"),
        (Place(1, "_multiarray_umath.cpython-311-x86_64-linux-gnu.so", "", "f"), "Python: NumPy"),
        (
            Place(1, "kernel", "", "f", ("virtblk_add_req", "io_submit_sqes")),
            "kernel: block device",
        ),
        (Place(1, "kernel", "", "clear_page", ("asm_exc_page_fault",)), "kernel: page faults"),
        (Place(1, "kernel", "", "tcp_sendmsg", ("__x64_sys_sendmsg",)), "kernel: network"),
        (Place(1, "kernel", "", "unheard_of"), "kernel: other"),
        (Place(1, "a.out", "", "main"), "other"),
    ],
    ids=lambda value: getattr(value, "function", None),
)
def test_groups(place: Place, group: str) -> None:
    assert group_of(place) == group


def test_every_source_of_libdlfs_is_in_a_group() -> None:
    sources = Path(__file__).parents[2].glob("native/src/**/*.c")
    for source in sources:
        name = f"{source.parent.name}/{source.name}"
        group = group_of(Place(1, "libdlfs.so", name, "f"))
        assert group != "libdlfs: other" or name.startswith(("import/", "volume/", "platform/v")), (
            name
        )


def test_addresses_are_looked_up_in_debug_information() -> None:
    library = str(LIBDLFS / "libdlfs.so")
    symbols = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    address = next(
        int(line.split()[0], 16) for line in symbols.splitlines() if "dlfs_crc32c" in line
    )
    found = look_up(library, [address])
    if not found:
        pytest.skip("libdlfs has no debug information here, or there is no addr2line")
    assert found[address][0] == "platform/crc32c.c"
    assert look_up(library, []) == {}


def recording(event: str, costs: dict[Place, int], samples: int) -> Recording:
    return Recording(event, Counter(costs), {1: "reader", 2: "mount"}, Done(samples, 1.0, 0.3))


def test_tables_say_what_a_sample_costs() -> None:
    python = Place(1, "python3.11", "", "f")
    sampled = recording("cycles", {python: 30, Place(2, "python3.11", "", "h"): 10}, 100_000)

    rows = report.group_table(sampled).rows

    assert rows == [
        ["reader", "Python: interpreter", "75.0%", "2.250"],
        ["mount", "Python: interpreter", "25.0%", "0.750"],
        ["all", "", "100%", "3.000"],
    ]
    lines = report.sections(report.Profile("cached", "batches", None, "perf: none"))
    assert "Missing: perf: none." in lines
    lines = report.sections(report.Profile("cached", "batches", sampled))
    assert any("3.000 us of CPU time each" in str(line) for line in lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    scene_of(folder / "dlfs-profile", SIZE)
    return folder


CASES_HERE = [
    pytest.param(case, marks=pytest.mark.fuse if case == "mount" else ()) for case in CASES
]


@pytest.mark.parametrize("case", CASES_HERE)
def test_a_tiny_profile_by_perf(case: str, folder: Path, tmp_path: Path) -> None:
    try:
        perf_event()
    except Unavailable as reason:
        pytest.skip(str(reason))
    words = [case, "--seconds", "0.1", "--size", str(SIZE), "--dir", str(folder)]
    assert main([*words, "--results", str(tmp_path)]) == 0

    (path,) = tmp_path.glob("*.md")
    text = path.read_text()
    assert "| reader | " in text, text
    assert "Missing" not in text


def test_what_is_missing_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    words = ["cached", "--size", str(SIZE), "--dir", str(folder)]
    assert main([*words, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.md")
    text = path.read_text()
    assert "Missing: perf is not installed: apt-get install linux-perf." in text


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-case"])
    assert "no case is called no-such-case" in capsys.readouterr().err
