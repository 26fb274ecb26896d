"""The race against peers at a tiny size: every peer's bytes, the framework, verdicts, pictures."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.errors import Unavailable, WrongBytesError
from bench.machine import Machine
from bench.peers import child as children
from bench.peers.__main__ import choose, main, parse_arguments, settings_of
from bench.peers.child import Job
from bench.peers.data import Data, list_corpus
from bench.peers.outcome import GLOBAL_GIVEN, GLOBAL_OWN, Converted, Outcome, Run
from bench.peers.peer import Peer, Reader, all_peers, touch
from bench.peers.race import Race, Settings
from bench.peers.report import make_report
from bench.peers.verdicts import verdicts
from bench.process import Parent, start_child
from bench.progress import Progress, Stretch
from bench.resources import descendants, peak_rss_bytes, pss_bytes
from dlfs.base.json_records import from_json
from dlfs.base.units import KIB
from tests.support.files import write_files

OURS = ("ours", "files", "packed", "images", "lmdb", "hdf5")
PEERS = [peer for peer in all_peers().values() if type(peer).__module__.split(".")[-1] in OURS]
DATA = Data("110k", 8 << 20, seed=1)
LACKING = ("not installed", "make bench installs it", "needs root", "cannot be opened", "mount")
"""In the reasons for which a machine may do without a peer."""


class TwoPipes:
    """A child's pipe in this process: the parent says everything at once."""

    def __init__(self) -> None:
        self._answers = io.StringIO()
        self.pipe = Parent(io.StringIO("go\ncheck\n"), self._answers)

    @property
    def answers(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._answers.getvalue().splitlines()]


def job_of(peer: Peer, folder: Path, **more: object) -> Job:
    data = replace(DATA, samples_max=all_peers()[peer.owner].samples_max)
    samples = len(data.source())
    job = Job("race", peer.name, str(folder), data, samples=samples, batch=16, seconds=0.02)
    return replace(job, **more)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of what was prepared, by peer; filled as it is needed."""
    return {"": tmp_path_factory.mktemp("peers")}


def folder_of(peer: Peer, prepared: dict[str, Path]) -> Path:
    name = peer.owner
    if name not in prepared:
        folder = prepared[""] / name
        folder.mkdir(exist_ok=True)  # left by another peer of this data, which lacks a program
        try:
            children.prepare(job_of(all_peers()[name], folder), all_peers()[name], TwoPipes().pipe)
        except Unavailable as reason:
            skip_where_it_may(reason)
        prepared[name] = folder
    return prepared[name]


def skip_where_it_may(reason: Unavailable) -> None:
    assert any(word in str(reason) for word in LACKING), reason
    pytest.skip(str(reason))


@pytest.mark.filterwarnings("default")  # of the peers' packages
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_reads_the_right_bytes(peer: Peer, prepared: dict[str, Path]) -> None:
    before = set(descendants(os.getpid()))  # other tests' helpers may live as long as their run
    folder = folder_of(peer, prepared)
    try:
        for warm in (False, True):
            with peer.share(folder, warm=warm):
                looked = TwoPipes()
                children.look(job_of(peer, folder), peer, looked.pipe)
                orders = [False] * peer.random + [True] * bool(looked.answers[0]["own_order"])
                assert orders
                for own in orders:
                    race_once(job_of(peer, folder, own=own, warm=warm), peer)
    except Unavailable as reason:
        skip_where_it_may(reason)
    assert before.issuperset(descendants(os.getpid())) or peer.name.startswith("dataloader")


def race_once(job: Job, peer: Peer) -> None:
    pipes = TwoPipes()
    children.race(job, peer, pipes.pipe)
    ready, told, checked = pipes.answers
    assert ready == {"ready": True}
    assert checked["checked"] > 16
    assert told["all_samples"] >= told["samples"] > 0
    assert told["begin"] <= told["first"] <= told["end"]
    assert told["first_batch_seconds"] > 0 or job.warm
    if told["whole"]:
        assert told["samples"] == told["all_samples"] == job.samples


# ---- what the framework notices ------------------------------------------------------------------


class Liar(Peer):
    """Keeps samples in this process, and can get them wrong."""

    name = "liar"
    about = "for tests"

    def __init__(self, wrong: int | None = None, twice: bool = False) -> None:
        self._source = DATA.source()
        self._wrong, self._twice = wrong, twice

    def prepare(self, source: object, folder: Path) -> None:
        """Nothing."""

    def open(self, folder: Path) -> Reader:
        return Reader(self._read, self._epoch, own_order="as stored")

    def _read(self, indices: Sequence[int]) -> list[bytes]:
        return [self._sample(index) for index in indices]

    def _epoch(self, seed: int, batch: int) -> Generator[tuple[list[int], list[bytes]], None, None]:
        order = list(range(len(self._source)))
        order[-1] = 0 if self._twice else order[-1]
        for at in range(0, len(order), batch):
            yield order[at : at + batch], self._read(order[at : at + batch])

    def _sample(self, index: int) -> bytes:
        data = self._source.data(index)
        return data[:-1] + b"?" if index == self._wrong else data


def test_wrong_bytes_end_the_race(tmp_path: Path) -> None:
    race_once(job_of(PEERS[0], tmp_path), Liar())
    for own in (False, True):
        job = job_of(PEERS[0], tmp_path, own=own, seconds=5.0)
        with pytest.raises(WrongBytesError, match="sample 0 has"):
            children.race(job, Liar(wrong=0), TwoPipes().pipe)


def test_an_epoch_that_repeats_a_sample_is_told(tmp_path: Path) -> None:
    job = job_of(PEERS[0], tmp_path, own=True, seconds=5.0)
    with pytest.raises(WrongBytesError, match="twice"):
        children.race(job, Liar(twice=True), TwoPipes().pipe)


def test_a_race_in_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        directory=tmp_path,
        sizes=("4k",),
        total_bytes=300 * KIB,
        seconds=0.02,
        rounds=1,
        states=("cold",),
    )
    machine = Machine(tmp_path, may_drop_caches=False, pretend_cold=True)
    shares: list[float] = []
    progress = Progress()
    monkeypatch.setattr(progress, "show", lambda _, share: shares.append(share))
    outcome = Outcome()
    race = Race(settings, outcome, machine)
    race.run([all_peers()["dlfs"], all_peers()["lmdb"]], progress.whole())

    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1
    assert not race.folder.exists()
    assert [one.peer for one in outcome.converted] == ["dlfs", "lmdb"]
    assert all(one.stored_bytes >= one.sample_bytes == 300 * KIB for one in outcome.converted)
    assert [run.processes for run in outcome.runs if run.peer == "lmdb"] == [1, 2]
    for run in outcome.runs:
        assert run.samples > 0
        assert run.seconds > 0
        if not run.limit:
            assert run.checked > 16
            assert run.peak_pss_bytes >= run.start_pss_bytes > 0
            assert (run.first_batch_seconds or 0) > 0
    assert all("not installed" in why or "uring" in why for *_, why in outcome.missing)
    again = from_json(json.dumps(asdict(outcome)), Outcome)
    assert again == outcome
    assert {one.peer for one in verdicts(outcome)} == {"lmdb"}


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    job = job_of(all_peers()["lmdb"], tmp_path / "nothing", verb="look")
    with (
        start_child("bench.peers.child", job, tmp_path / "log") as child,
        pytest.raises(Unavailable, match="it failed: "),
    ):
        child.answer(60.0)
    assert before.issuperset(descendants(os.getpid()))


# ---- small parts ---------------------------------------------------------------------------------


def test_processes_are_measured() -> None:
    assert peak_rss_bytes(os.getpid()) >= pss_bytes([os.getpid()]) // 2 > 0
    assert pss_bytes([]) == peak_rss_bytes(0) == 0


def test_touch_reads_and_gives_back() -> None:
    view = memoryview(bytes(10_000))
    assert touch(view) is view
    assert len(touch(memoryview(b""))) == 0


def test_a_corpus_is_listed_in_path_order(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_files(corpus, {"b/x": b"b/x", "a-b": b"a-b", "a/y": b"a/y", "empty": b""})
    (corpus / "link").symlink_to("a-b")
    total = list_corpus(corpus, tmp_path / "paths")
    data = Data("corpus", total, 1, str(corpus), str(tmp_path / "paths"))
    assert [(path, found) for _, path, found in data.source()] == [
        (b"a-b", b"a-b"),
        (b"a/y", b"a/y"),
        (b"b/x", b"b/x"),
        (b"empty", b""),
    ]
    some = replace(data, samples_max=2).source()
    assert len(some) == 2
    assert some.data(1) == some.path(1) * (some.path(1) != b"empty")


def run_of(peer: str, rate: int, **more: object) -> Run:
    run = Run(peer, "4k", GLOBAL_GIVEN, False, 1, 1, 0, rate, rate * 4096, 1.0, 0.5)
    return replace(run, **more)


def test_verdicts_compare_within_a_round_and_take_the_fastest_way() -> None:
    runs = [
        run_of("dlfs", 100),
        run_of("dlfs", 300, round=1),
        run_of("dlfs-epoch", 10, order=GLOBAL_OWN),
        run_of("lmdb", 50),
        run_of("lmdb", 100, round=1),
        run_of("lmdb-views", 20),
        run_of("webdataset", 400, order="shards shuffled"),
        run_of("files", 10),
        run_of("dlfs", 700, warm=True),
        run_of("lmdb", 200, warm=True),
        run_of("fio", 1000, limit=True),
    ]
    datasets = {"4k": {"sample_bytes": 1000}}
    given = verdicts(Outcome(runs, datasets=datasets))
    found = {(one.peer, one.state, one.at_least): one for one in given}
    assert found["lmdb", "cold", 2.0].ratios == (2.0, 3.0)
    assert found["lmdb", "cold", 2.0].verdict == "met"
    assert found["webdataset (shards shuffled)", "cold", 2.0].verdict == "MISSED"
    assert found["files", "cold", 0.0].verdict == ""
    assert found["lmdb", "warm", 3.0].measured == 3.5
    assert {peer for peer, state, _ in found if state == "cold, little memory"} == {
        "lmdb",
        "webdataset (shards shuffled)",
        "files",
    }
    apart = [run_of("dlfs", 1, group=1), run_of("lmdb", 1, group=2)]
    assert verdicts(Outcome(apart, datasets=datasets)) == []


def test_with_little_memory_ways_that_have_the_data_there_are_left_out() -> None:
    runs = [
        run_of("dlfs", 20),
        run_of("dlfs-epoch-all", 300, order=GLOBAL_OWN, peak_pss_bytes=900),
        run_of("lmdb", 10, start_pss_bytes=100, peak_pss_bytes=500),
        run_of("lmdb-readahead", 100, start_pss_bytes=100, peak_pss_bytes=700),
    ]
    found = verdicts(Outcome(runs, datasets={"4k": {"sample_bytes": 1000}}))
    assert [(one.ours, one.peer, one.state, one.measured) for one in found] == [
        ("dlfs-epoch-all", "lmdb-readahead", "cold", 3.0),
        ("dlfs", "lmdb", "cold, little memory", 2.0),
    ]


def outcome_of_all() -> Outcome:
    peers = ("dlfs", "dlfs-epoch", "dlfs-mount", "lmdb", "hdf5", "files")
    datasets = {
        key: {"about": key, "samples": 100, "sample_bytes": 100 * size}
        for key, size in (("512", 512), ("4k", 4096), ("110k", 112640))
    }
    runs = [
        run_of(peer, 1000 * (number + 1), dataset=key, warm=warm, processes=processes)
        for number, peer in enumerate(peers)
        for key in datasets
        for warm in (False, True)
        for processes in (1, 2)
    ]
    runs += [run_of("fio", 9000, dataset=key, limit=True) for key in datasets]
    converted = [Converted("lmdb", "4k", 1.0, 0.5, 500_000, 100, 409_600)]
    missing = [("litdata", "4k", "", "litdata is not installed")]
    return Outcome(runs, converted, missing, datasets, {"lmdb": "1"})


def test_reports_are_written(tmp_path: Path) -> None:
    facts = {"date": "2026-11-21T00:00:00+00:00", "commit": "abc"}
    path = make_report(facts, {"seed": 1}, outcome_of_all()).write(tmp_path)
    text = path.with_suffix(".md").read_text()
    assert "| lmdb | 100 | 1.00 |" in text
    assert "- litdata did not run: litdata is not installed" in text
    assert "| peer | 512 B, cold | " in text
    assert "| lmdb, cached reads: 3 times | - | - | **0.25 MISSED** |" in text


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse_arguments(["--quick", "--dir", str(tmp_path), "--sizes", "4k,512"])
    settings = settings_of(arguments)
    assert (settings.rounds, settings.sizes, settings.two_at) == (1, ("4k", "512"), "4k")
    assert {peer.name for peer in choose(["lmdb*"])} >= {"dlfs", "dlfs-epoch", "lmdb", "lmdb-views"}
    assert main(["--list"]) == 0
    assert "readahead=False" in capsys.readouterr().out
    for words in (["--sizes", "5k"], ["--sizes", "corpus"]):
        assert main([*words, "--dir", str(tmp_path)]) == 2


def test_names_are_of_families_and_say_how_they_are_used() -> None:
    for peer in all_peers().values():
        assert peer.name == peer.name.lower()
        assert peer.about
        assert peer.owner in all_peers()


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (WrongBytesError, 1)])
def test_what_was_run_is_kept_when_the_race_ends_early(
    error: type[BaseException], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(race: Race, peers: Sequence[Peer], whole: Stretch) -> None:
        race.outcome.runs += outcome_of_all().runs
        race.outcome.datasets |= outcome_of_all().datasets
        raise error

    monkeypatch.setattr(Race, "run", run)
    words = ["--dir", str(tmp_path), "--results", str(tmp_path / "out"), "--sizes", "4k"]
    assert main(words) == code
    (path,) = (tmp_path / "out").glob("*.json")
    assert len(json.loads(path.read_text())["runs"]) == len(outcome_of_all().runs)
