"""``dlfs bench``: what it measures, what it says, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs._native import raw_reads
from dlfs._native.raw_reads import read_raw
from dlfs.block import open_device
from dlfs.diagnosis import bench, fio
from dlfs.diagnosis.bench import DeviceRates, measure, name_limit
from dlfs.diagnosis.consuming import Run, add_runs
from dlfs.diagnosis.fio import FileRange, FioResult, run_fio
from dlfs.service.statistics import Activity
from tests.support.hanging_file import hanging_file
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume, write_dataset

MIB = 1 << 20
SAMPLES = {b"%03d" % number: bytes([number % 251]) * 9000 for number in range(300)}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = new_volume(tmp_path / "a volume: of 1.img", size_bytes=16 * MIB)
    write_dataset(path, "train", SAMPLES)
    return path


# ---- raw reads -----------------------------------------------------------------------------------


def test_raw_reads_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(os.urandom(MIB))
    wanted: list[int] = []

    def offsets(count: int) -> np.ndarray:
        found = np.arange(len(wanted), len(wanted) + count, dtype=np.int64) % 256 * 4096
        wanted.extend(found.tolist())
        if len(wanted) > 1000:
            stop.set()
        return found

    stop = threading.Event()
    with open_device(str(path)) as device:
        found = read_raw(device.native, offsets, request_bytes=4096, depth=7, seconds=60, stop=stop)
    assert found.count == len(wanted) > 1000
    assert found.read_bytes == 4096 * found.count
    assert 0 < found.seconds < 60


def test_a_raw_read_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(MIB))
    with open_device(str(path)) as device:
        os.truncate(path, MIB // 2)
        with pytest.raises(dlfs.TruncatedError, match=f"at byte {MIB - 4096}, 4096 bytes"):
            read_raw(
                device.native,
                lambda count: np.full(count, MIB - 4096),
                request_bytes=4096,
                depth=2,
                seconds=60,
                stop=threading.Event(),
            )


@pytest.mark.fuse
def test_a_device_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_reads, "SILENT_SECONDS", 0.3)
    (tmp_path / "disk").write_bytes(bytes(MIB))
    with hanging_file(tmp_path / "disk", tmp_path / "mnt") as file:
        device = open_device(str(file.path))
        file.hang()
        began = time.monotonic()
        with pytest.raises(dlfs.DeviceTimeoutError, match="no completion"):
            read_raw(
                device.native,
                lambda count: np.zeros(count, np.int64),
                request_bytes=4096,
                depth=4,
                seconds=60,
                stop=threading.Event(),
            )
        assert time.monotonic() - began < 30
        file.go_on()
        device.close()


# ---- the whole -----------------------------------------------------------------------------------


def test_what_is_measured(volume: Path) -> None:
    before = hashlib.sha256(volume.read_bytes()).digest()
    steps: list[str] = []
    report = measure(str(volume), None, seconds=0.5, say=steps.append)
    assert hashlib.sha256(volume.read_bytes()).digest() == before
    assert report.dataset == "train@1"
    assert report.binds.startswith("binds: not known: the samples have ")
    assert [row.step for row in report.rows] == ["device"] * 3 + ["api"] * 2
    at_random, sequential, alone, random, epoch = report.rows
    assert "9 KiB" in at_random.what
    assert "256 KiB" in sequential.what
    assert alone.latency_s > 0
    for row in (at_random, sequential, random, epoch):
        assert row.read_bytes > row.reads > 0
    assert at_random.read_bytes == pytest.approx(9216 * at_random.reads)
    assert epoch.share > 0
    assert epoch.of == "device"
    assert any("an epoch" in step for step in steps)


def test_without_fio_it_says_so(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_fio", lambda: None)
    report = measure(str(volume), "train", seconds=0.5)
    assert "fio is not installed: apt install fio to compare with it" in report.notes
    assert not any("fio" in row.of for row in report.rows)


@pytest.mark.skipif(fio.find_fio() is None, reason="fio is not installed")
def test_fio_reads_a_range(volume: Path) -> None:
    options = {"random": True, "request_bytes": 4096, "depth": 4, "seconds": 0.1}
    program = fio.find_fio()
    assert program is not None
    found = run_fio(program, [FileRange(str(volume), MIB, 2 * MIB)], **options)
    assert isinstance(found, FioResult), found
    assert found.read_bytes == pytest.approx(4096 * found.reads, rel=0.1)
    refused = run_fio(program, [FileRange(str(volume.with_name("no")), 0, MIB)], **options)
    assert isinstance(refused, str)
    assert refused
    assert not volume.with_name("no").exists()


def test_a_storage_node() -> None:
    space = Namespace(24 * MIB, block_bytes=4096)
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [space])]) as target:
        dlfs.format_volume(target.uri())
        write_dataset(target.uri(), "train", dict(list(SAMPLES.items())[:40]))
        report = measure(target.uri(), None, seconds=0.5)
    (network,) = [row for row in report.rows if row.step == "network"]
    assert "TCP round trip to 127.0.0.1" in network.what
    assert network.latency_s > 0
    assert "fio reads files and disks only" in report.notes


@pytest.mark.fuse
def test_a_mount_is_measured_and_goes(volume: Path) -> None:
    command = ["bench", volume, "--mount", "--seconds", "0.5", "--json"]
    done = subprocess.run([sys.executable, "-m", "dlfs.cli", *command], capture_output=True)
    assert done.returncode == 0, done.stderr
    *_, row = json.loads(done.stdout)["rows"]
    assert row["step"] == "mount"
    assert row["reads"] > 0
    assert "dlfs-bench" not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.fuse
@pytest.mark.parametrize(("step", "seconds"), [("device: random", 60), ("files of a mount", 0.5)])
def test_ctrl_c_leaves_nothing(volume: Path, tmp_path: Path, step: str, seconds: float) -> None:
    command = ["bench", volume, "--mount", "--seconds", str(seconds)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "dlfs.cli", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(step):
                process.send_signal(signal.SIGINT)
                break
        assert "interrupted" in process.stderr.read()
        assert process.wait(60) == 130
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert not list(tmp_path.glob("dlfs-bench-*"))


def test_an_empty_dataset_and_a_service_are_refused(tmp_path: Path) -> None:
    path = new_volume(tmp_path / "volume.img", size_bytes=16 * MIB)
    with dlfs.open(str(path)) as opened, opened.writer("empty"):
        pass
    with pytest.raises(dlfs.UsageError, match="expected a dataset with samples"):
        measure(str(path), None, seconds=0.5)
    command = [sys.executable, "-m", "dlfs.cli", "bench", "unix:x.sock"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "a service hides its devices" in done.stderr) == (2, True)


def test_memory_for_raw_reads_is_bounded(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUFFER_BYTES_MAX", MIB)
    rows = measure(str(volume), None, seconds=0.5).rows
    assert [row.what.rpartition(" ")[2] for row in rows[:2]] == ["113", "4"]


# ---- verdicts ------------------------------------------------------------------------------------


def a_run(**phases: float) -> Run:
    shares = {"device": 0.0, "checking": 0.0, "planning": 0.0, "rest": 0.0} | phases
    seen = Activity(1.0, 1000, 10 * MIB, 0, 500, 0, 0, shares, 0.5)
    return Run(1.0, 0.5, 4, seen, [], reads=500, read_bytes=10 * MIB)


def limit(run: Run, share: float, *, over_network: bool = False) -> str:
    return name_limit(run, share, 10 * 32 * MIB, 32 * MIB, over_network=over_network)


def test_what_binds() -> None:
    waiting, checking = a_run(device=0.9), a_run(checking=0.6, device=0.4)
    assert limit(waiting, 0.9).startswith("binds: device:")
    assert limit(waiting, 0.9, over_network=True).startswith("binds: network and target:")
    assert limit(waiting, 0.4).startswith("binds: latency:")
    assert "computes checksums" in limit(checking, 0.4)
    resting = a_run(rest=0.7, checking=0.3)
    assert "takes the batches" in limit(resting, 0.4)
    cached = replace(waiting, seen=replace(waiting.seen, cache_hits=1000))
    assert limit(cached, 0.0).startswith("binds: memory:")
    nothing = replace(waiting, seen=replace(waiting.seen, samples=0))
    assert "nothing was read" in limit(nothing, 0.0)
    small = name_limit(waiting, 0.9, 31 * MIB, 32 * MIB, over_network=False)
    assert small.startswith("binds: not known: the samples have 31.0 MiB")


def test_the_time_for_which_devices_are_busy() -> None:
    rates = DeviceRates(request_bytes=4096, requests=10_000, chunk_bytes=262_144, chunks=1000)
    assert rates.busy_share(5000, 5000 * 4096, 1.0) == pytest.approx(0.5)
    assert rates.busy_share(1000, 1000 * 262_144, 2.0) == pytest.approx(0.5)
    between = rates.busy_share(1000, 1000 * (4096 + 262_144) / 2, 1.0)
    assert between == pytest.approx((1000 / 10_000 + 1000 / 1000) / 2)
    assert rates.busy_share(0, 0, 1.0) == 0


def test_runs_are_added() -> None:
    both = add_runs([a_run(device=0.5), a_run(device=0.5, rest=1.0)])
    assert (both.seconds, both.batches, both.reads, both.read_bytes) == (2.0, 8, 1000, 20 * MIB)
    assert (both.seen.samples, both.seen.seconds) == (2000, 2.0)
    assert both.seen.phase_shares["device"] == 0.5
