"""Every contender and data set of the benchmark at a tiny size, so that none rots.

Speed is asserted nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.cases import report
from bench.cases.command import choose, parse_arguments, settings_of
from bench.cases.runner import Result, Settings, Stage, compare
from bench.cases.table import CASES, Case, Floor, per_core, rate
from bench.contenders.initiators import tls_options, transport_id
from bench.contenders.samples import Batches, Epoch
from bench.errors import OccupiedError, Unavailable, WrongBytesError
from bench.measurement import Limits, Measurement, check_bytes
from bench.process import find_program
from bench.progress import Progress
from bench.targets import Targets
from dlfs.base.units import KIB, MIB
from dlfs.block import open_device
from dlfs.errors import UsageError
from tests.support.files import write_files
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem

NAMESPACE_BYTES = 96 * MIB
LIMITS = Limits(seconds=0.03, mount_files=40, paths=5000, datasets=12, clients=2)
MARKS = {
    "mount": pytest.mark.fuse,
    "walk": pytest.mark.fuse,
    "checkpoint": pytest.mark.torch,
    "fields": pytest.mark.torch,
}


def with_something_new(cases: Iterable[Case]) -> Iterator[Case]:
    """Give the cases whose contenders, or whose data set, no earlier one has."""
    seen: set[object] = set()
    for case in cases:
        parts = {case.dataset, tuple(who.label for who in case.contenders)}
        if not parts <= seen:
            yield case
        seen |= parts


NAMES = [
    pytest.param(case, id=case.name, marks=MARKS.get(case.name.partition("-")[0], ()))
    for case in with_something_new(CASES)
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("bench")
    corpus = folder / "corpus"
    write_files(corpus, {f"drivers{n % 3}/file {n}.c": b"int x;\n" * n * 17 for n in range(40)})
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [Namespace(NAMESPACE_BYTES)])]) as target:
        settings = Settings(
            directory=folder,
            rounds=1,
            total_bytes=600 * KIB,
            files_max=100,
            corpus=corpus,
            limits=LIMITS,
            targets=Targets((target.uri(),)),
        )
        stage = Stage(settings)
        stage.machine.may_drop_caches = False
        stage.machine.pretend_cold = True
        yield stage
        stage.close()
        with open_device(target.uri()) as device:
            assert device.read(0, MIB).count(0) == MIB
    assert not stage.folder.exists()


@pytest.mark.parametrize("case", NAMES)
def test_every_case_runs_and_reads_the_right_bytes(stage: Stage, case: Case) -> None:
    result = stage.run(case, Progress().whole())

    ours = [label for label in result.runs if label.startswith("DLFS")]
    assert ours
    assert all(run.checked for label in ours for run in result.runs[label])
    for label, runs in result.runs.items():
        assert all(run.seconds > 0 for run in runs)
        # On a busy machine fio completes nothing in its short time.
        assert label.startswith("fio ") or all(run.samples > 0 for run in runs), label
    reasons = [why for why in result.missing.values() if "not installed" not in why]
    excused = ("fio", "uring", "no --target spdk:")
    assert not [why for why in reasons if not any(word in why for word in excused)]
    assert len(report.case_table(result).rows) == len(case.contenders)


def test_names_are_unique_and_floors_name_their_own_contenders() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert len({who.label for who in case.contenders}) == len(case.contenders)
        for floor in case.floors:
            assert {floor.of, *floor.against} <= set(case.contenders)
            assert bool(floor.against) != bool(floor.base)


def test_wrong_bytes_are_told(stage: Stage) -> None:
    scene = stage.scene("4k")
    assert check_bytes(scene.source, {3: scene.source.data(3)}) == 1
    with pytest.raises(WrongBytesError, match="sample 3"):
        check_bytes(scene.source, {3: scene.source.data(4)})


def test_a_scene_is_kept_until_something_about_it_changes(stage: Stage, tmp_path: Path) -> None:
    settings = replace(stage.settings, directory=tmp_path, total_bytes=300 * KIB, keep=True)
    first = Stage(settings)
    inode = first.scene("4k").volume.stat().st_ino
    first.close()
    second = Stage(settings)
    assert second.scene("4k").volume.stat().st_ino == inode
    second.close()
    third = Stage(replace(settings, total_bytes=400 * KIB, keep=False))
    assert len(third.scene("4k")) == 100
    third.close()


def test_a_floor_is_the_median_of_ratios_round_by_round() -> None:
    ours, peer = Epoch("global", 1), Batches(1)
    floor = Floor("twice the peer", ours, 2.0, rate, (peer,))
    case = Case("a", "4k", "", (ours, peer), (floor,))
    runs = {
        ours.label: [Measurement(100, 0, *times) for times in ((1.0, 0.5), (2.0, 0.5), (1.0, 4.0))],
        peer.label: [Measurement(samples, 0, 1.0, 0.5) for samples in (25, 50, 40)],
    }
    assert compare(floor, runs).ratios == (4.0, 1.0, 2.5)
    assert compare(floor, {ours.label: runs[ours.label]}).ratios == ()
    table = report.floor_table([Result(case, {}, runs, {}), Result(case, {}, {}, {})])
    assert table.title == "Floors: 1 met, 1 not measured"
    assert table.rows[0][2:] == ("2", "-", "", "not measured")
    assert table.rows[1][2:] == ("2", "2.50", "1.00 - 4.00", "met")
    assert per_core(runs[ours.label][2]) == 25.0


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse_arguments(
        ["--quick", "--size", "1MiB", "--seed", "5", "--dir", str(tmp_path)]
    )
    settings = settings_of(arguments)
    assert (settings.rounds, settings.total_bytes, settings.limits.seed) == (1, 1 << 20, 5)
    assert [case.name for case in choose(["get-*"], corpus=False)] == ["get-4k"]
    assert not any(case.dataset == "corpus" for case in choose(None, corpus=False))
    assert not any(case.name.startswith("nvme") for case in choose(None, corpus=True))
    assert len(choose(None, corpus=True, target=True)) == len(CASES)
    assert fnmatchcase("cached-4k", "cached-*")


def test_a_namespace_that_holds_something_is_refused(stage: Stage, tmp_path: Path) -> None:
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [Namespace(NAMESPACE_BYTES)])]) as target:
        with open_device(target.uri(), writable=True) as device:
            device.write(0, b"precious".ljust(4096))
        refused = Stage(
            replace(stage.settings, directory=tmp_path, targets=Targets((target.uri(),)))
        )
        with pytest.raises(OccupiedError, match="--force"):
            refused.scene("nvme-4k")
        refused.close()
        with open_device(target.uri()) as device:
            assert device.read(0, 4096).startswith(b"precious")
        forced = Targets((target.uri(),), force=True)
        taken = Stage(replace(stage.settings, directory=tmp_path, targets=forced))
        assert len(taken.scene("nvme-4k")) == 150
        taken.close()


def test_targets_that_do_not_fit_are_told(stage: Stage, tmp_path: Path) -> None:
    small = Subsystem(DEFAULT_NQN, [Namespace(4 * MIB), Namespace(4 * MIB, nsid=2)])
    with ScriptedTarget([small]) as target:
        one, other = target.uri(), target.uri().replace("nsid=1", "nsid=2")
        for uris, says in (((one, other), "expected one namespace"), ((one,), "too few")):
            settings = replace(stage.settings, directory=tmp_path, targets=Targets(uris))
            with pytest.raises(UsageError, match=says):
                Stage(settings).scene("nvme-4k")


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (
            "nvme-tcp://10.0.0.5/nqn.2024-01.org.example:a?nsid=3",
            "trtype:TCP adrfam:IPv4 traddr:10.0.0.5 trsvcid:4420 subnqn:nqn.2024-01.org.example:a "
            "ns:3",
        ),
        (
            "nvme-tcp://[::1]:4421/nqn.2024-01.org.example:a?nsid=1",
            "trtype:TCP adrfam:IPv6 traddr:::1 trsvcid:4421 subnqn:nqn.2024-01.org.example:a ns:1",
        ),
        ("spdk:trtype=PCIe traddr=0000:5e:00.0 nsid=2", "trtype:PCIe traddr:0000:5e:00.0 ns:2"),
    ],
)
def test_spdk_perf_is_given_the_same_namespace(uri: str, expected: str) -> None:
    assert transport_id((uri,)) == expected
    with pytest.raises(Unavailable, match="cannot read"):
        transport_id(("/a/file",))


def test_spdk_perf_is_given_the_tls_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLFS_KEYS", "/keys")
    nqn = "nqn.2024-01.org.example:a"
    uri = f"nvme-tcp://10.0.0.1/{nqn}?nsid=1&hostnqn={nqn}-host"
    assert tls_options((uri,)) == []
    assert tls_options((f"{uri}&tls_psk=wire",)) == ["-S", "ssl", "--psk-path", "/keys/wire"]
    assert transport_id((uri,)).endswith(f"subnqn:{nqn} ns:1 hostnqn:{nqn}-host")


def test_a_whole_run_leaves_json_and_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--cases", "cached-512", "--size", "100KiB", "--rounds", "2"]
    words += ["--seconds", "0.02", "--dir", str(tmp_path), "--results", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", words)
    assert main() == 0
    assert "cached-512" in capsys.readouterr().out
    (found,) = (tmp_path / "out").glob("*.json")
    whole = json.loads(found.read_text())
    assert {"commit", "kernel", "cpu", "device", "versions", "date"} <= set(whole["machine"])
    (case,) = whole["cases"]
    assert case["dataset"]["seed"] == 1
    assert len(case["runs"]["DLFS read() of batches in memory"]) == 2
    assert "| contender |" in found.with_suffix(".md").read_text()


def test_a_corpus_that_is_missing_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.datasets.CORPUS_ARCHIVE", tmp_path / "none.tar.xz")
    monkeypatch.setattr("sys.argv", ["bench", "--corpus", "deb", "--dir", str(tmp_path)])
    assert main() == 2
    assert "apt-get install" in capsys.readouterr().out


def test_what_a_machine_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="apt-get install fio"):
        find_program("fio", "fio")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (WrongBytesError, 1)])
def test_cases_that_were_run_are_kept_when_one_ends_the_benchmark(
    error: type[BaseException], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Stage.run

    def run(stage: Stage, case: Case, *more: object, **named: object) -> Result:
        if case.name == "cached-4k":
            raise error
        return real(stage, case, *more, **named)

    monkeypatch.setattr(Stage, "run", run)
    words = ["--cases", "cached-*", "--size", "100KiB", "--seconds", "0.02", "--rounds", "1"]
    assert main([*words, "--dir", str(tmp_path), "--results", str(tmp_path / "out")]) == code
    (found,) = (tmp_path / "out").glob("*.json")
    assert [case["case"] for case in json.loads(found.read_text())["cases"]] == ["cached-512"]
    assert not (tmp_path / "dlfs-bench").exists()
