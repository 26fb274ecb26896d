"""``dlfs mount --replace``: programs do not notice that a mount gets another keeper and server.

``DLFS_SERVER_REPLACES`` is the number of replacements under load; a few by default. With it, the
pauses of a program that sends one request after the other are printed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import SimpleQueue
from pathlib import Path

import pytest

import dlfs
from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.mount.mountpoint import detach, find_dlfs, find_mount
from dlfs.mount.supervise import keeper as keepers
from dlfs.mount.supervise import replacement
from dlfs.mount.supervise.background import replace_server
from dlfs.mount.supervise.inherited import InheritedMount
from dlfs.mount.supervise.keeper import Server
from dlfs.mount.supervise.replacement import Predecessor
from tests.fuse.keeping import (
    FILES,
    NEEDS_KEEPER,
    drop_caches,
    kept,
    make_volume,
    running_programs,
    start_keeper,
    unmounting,
)
from tests.fuse.mounting import (
    SECONDS_MAX,
    Mount,
    add_dataset,
    mounted,
    parent_of,
    run_cli,
    wait_for_exit,
)
from tests.support.stopping import stop_process, wait_for_stop
from tests.support.waiting import wait_for

REPLACES = int(os.environ.get("DLFS_SERVER_REPLACES", "3"))
PACKAGE = Path(dlfs.__file__).parent

pytestmark = NEEDS_KEEPER


def replace(mount: Mount) -> None:
    """Replace the server of a mount, and wait for the end of the processes before."""
    before = mount.pid, parent_of(mount.pid)
    mount.pid = replace_server(mount.directory).pid
    for pid in before:
        wait_for_exit(pid)


# ---- what programs notice ------------------------------------------------------------------------


@contextlib.contextmanager
def probed(directory: Path, results: Path) -> Iterator[None]:
    """Run a program that sends one request after the other, and logs when and how long each was."""
    code = (
        "import itertools, os, sys, time\n"
        "for number in itertools.count():\n"
        "    start = time.monotonic()\n"
        "    os.path.exists(f'{sys.argv[1]}/none-{number}')\n"
        "    print(start, time.monotonic(), flush=True)\n"
        "    time.sleep(0.001)\n"
    )
    with results.open("w") as file:
        probe = subprocess.Popen([sys.executable, "-c", code, directory], stdout=file)
        try:
            yield
        finally:
            probe.kill()
            probe.wait()


@pytest.mark.timeout(300 + 20 * REPLACES)
def test_rule_36_programs_do_not_notice_replacements(mount: Mount, tmp_path: Path) -> None:
    times = []
    with running_programs(mount), probed(mount / "train", tmp_path / "probes"):
        for _ in range(REPLACES):
            drop_caches()
            start = time.monotonic()
            replace(mount)
            times.append((start, time.monotonic()))
    lines = (tmp_path / "probes").read_text().splitlines()
    probes = [[float(word) for word in line.split()] for line in lines if line.count(" ") == 1]
    pauses = [max(e - s for s, e in probes if s < end and e > start) for start, end in times]
    print(
        f"{REPLACES} replacements: pauses of {statistics.median(pauses):.3f} s (median) to ", end=""
    )
    print(f"{max(pauses):.3f} s; longest of all requests {max(e - s for s, e in probes):.3f} s")
    assert mount.log.read_text().count("answers, dlfs") == REPLACES
    assert "another server" not in mount.log.read_text()


def test_what_a_program_has_open_goes_on(mount: Mount) -> None:
    before = os.stat(mount / "train/d1/007").st_ino
    folder = os.open(mount / "train/d1", os.O_RDONLY | os.O_DIRECTORY)
    opened = os.open(mount / "train/d1/007", os.O_RDONLY)
    with mmap.mmap(opened, 0, prot=mmap.PROT_READ) as mapped:
        replace(mount)
        drop_caches()
        assert os.pread(opened, 6000, 0) == FILES[b"d1/007"]
        assert bytes(mapped) == FILES[b"d1/007"]
        assert len(os.listdir(folder)) == 50
        listed = subprocess.run(["ls"], cwd=f"/proc/self/fd/{folder}", pass_fds=[folder],
                                capture_output=True, text=True, check=True)  # fmt: skip
        assert len(listed.stdout.split()) == 50
        assert os.stat(mount / "train/d1/007").st_ino == before
    add_dataset(mount.volume, "younger", {b"x": b"younger"})
    wait_for(lambda: (mount / "younger/x").exists(), "the dataset")
    os.close(folder)
    os.close(opened)
    keeper = parent_of(mount.pid)
    os.kill(mount.pid, signal.SIGKILL)
    assert (mount / "younger/x").read_bytes() == b"younger"
    assert run_cli("umount", mount.directory).returncode == 0
    wait_for_exit(keeper)


# ---- versions and options ------------------------------------------------------------------------


def run_copy(tmp_path: Path, file: str, before: str, after: str, *arguments: str | Path) -> str:
    """Run a dlfs in which one file is different, in a virtual environment of its own.

    Returns:
        What it prints.
    """
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    others = (path for path in sys.path if path.endswith("site-packages"))
    (packages / "others.pth").write_text("\n".join(others))
    shutil.copytree(PACKAGE, packages / "dlfs", ignore=shutil.ignore_patterns("__pycache__"))
    text = (packages / "dlfs" / file).read_text()
    assert before in text
    (packages / "dlfs" / file).write_text(text.replace(before, after))
    done = subprocess.run(
        [environment / "bin/python", "-m", "dlfs.cli", *map(str, arguments)],
        cwd=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_server_is_of_the_version_that_replaces(mount: Mount, tmp_path: Path) -> None:
    version = f'__version__ = "{dlfs.__version__}"', '__version__ = "77.1"'
    arguments = ("--replace", mount.directory, "--memory", "64MiB", "--json")
    output = run_copy(tmp_path, "__init__.py", *version, "mount", *arguments)
    assert '"transport": "/dev/fuse"' in output
    assert f"dlfs 77.1 answers, dlfs {dlfs.__version__} before" in mount.log.read_text()
    mount.pid = json.loads(output)["pid"]
    libraries = Path(f"/proc/{mount.pid}/maps").read_text()
    assert str(tmp_path / "environment") in libraries
    assert (mount / "train/d0/000").read_bytes() == FILES[b"d0/000"]
    replace(mount)
    assert f"dlfs {dlfs.__version__} answers, dlfs 77.1 before" in mount.log.read_text()


def test_the_present_server_goes_on_if_the_new_one_is_broken(mount: Mount, tmp_path: Path) -> None:
    broken = "def serve(", "raise RuntimeError('not finished')\n\n\ndef serve("
    output = run_copy(tmp_path, "mount/server.py", *broken, "mount", "--replace", mount.directory)
    assert "RuntimeError: not finished" in output
    volume = mount.volume.rename(tmp_path / "elsewhere")
    with pytest.raises(NotFoundError, match="volume"):
        replace_server(mount.directory)
    volume.rename(mount.volume)
    assert parent_of(mount.pid) != 1
    assert (mount / "train/d0/000").read_bytes() == FILES[b"d0/000"]
    replace(mount)


def test_replacements_at_the_same_time_exclude_each_other(mount: Mount) -> None:
    def try_to_replace(directory: Path) -> int | str:
        try:
            return replace_server(directory).pid
        except DeviceError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(try_to_replace, 3 * [mount.directory]))
    pids = [each for each in results if isinstance(each, int)]
    assert pids
    for each in results:
        assert isinstance(each, int) or "has been replacing it for" in each

    def serving() -> list[int]:
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    wait_for(lambda: len(serving()) == 1, "the servers that were replaced")
    mount.pid = serving()[0]
    assert (mount / "train/d0/000").read_bytes() == FILES[b"d0/000"]


def test_mounts_that_cannot_be_taken_over(mount: Mount, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a mount of DLFS, got nothing mounted there"):
        replace_server(tmp_path)
    with pytest.raises(UsageError, match="expected a mount of DLFS, got proc mounted there"):
        replace_server("/proc")
    with (
        mounted(mount.volume, tmp_path / "other", tmp_path / "log", restart=False) as other,
        pytest.raises(NotFoundError, match="the mount has no keeper"),
    ):
        replace_server(other.directory)


def test_a_mount_with_incoming(mount: Mount, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    with mounted(
        mount.volume, tmp_path / "other", tmp_path / "log", incoming=str(staging)
    ) as other:
        (other / "incoming/new").mkdir()
        with (other / "incoming/new/a").open("wb", buffering=0) as file:
            file.write(b"one")
            before, other.pid = other.pid, replace_server(other.directory).pid
            wait_for_exit(before)
            file.write(b" two")
        done = run_cli("seal", other.directory, "new")
        assert done.returncode == 0, done.stderr
        assert (other / "new/a").read_bytes() == b"one two"


# ---- replacements that are interrupted -----------------------------------------------------------


def answer(kept: InheritedMount, ready: Callable[[], None]) -> None:
    kept.connect()
    ready()
    signal.pause()


def die_unprepared(_kept: InheritedMount, _ready: Callable[[], None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_connected(kept: InheritedMount, _ready: Callable[[], None]) -> None:
    kept.connect()
    os.kill(os.getpid(), signal.SIGKILL)


def end_keeper(number: int, kept: InheritedMount, ready: Callable[[], None]) -> None:
    keeper = os.getppid()
    kept.connect()
    os.kill(keeper, number)
    wait_for_exit(keeper)
    ready()


def is_listening(keeper: int) -> bool:
    """Return True if a keeper has the socket of its mount, which one before it may have had."""
    sockets = set()
    for descriptor in Path(f"/proc/{keeper}/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed meanwhile
            sockets.add(os.readlink(descriptor))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(
        line[-1].startswith("@dlfs-mount-") and f"socket:[{line[6]}]" in sockets for line in lines
    )


@contextlib.contextmanager
def replaceable(directory: Path, servers: list[Server]) -> Iterator[int]:
    """Run a keeper as ``kept`` does; yield its process ID when new keepers can reach it."""
    with kept(directory, servers) as keeper:
        wait_for(lambda: is_listening(keeper), "the keeper")
        yield keeper


FAILURES = {
    "server killed": die_connected,
    "keeper killed": functools.partial(end_keeper, signal.SIGKILL),
    "keeper ended": functools.partial(end_keeper, signal.SIGTERM),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_present_keeper_goes_on_if_the_new_one_dies(tmp_path: Path, failure: str) -> None:
    directory = tmp_path / "mnt"
    with replaceable(directory, [answer, unmounting(directory)]) as keeper:
        for server in (die_unprepared, FAILURES[failure]):
            new = start_keeper(directory, server, replaces=True)
            ended = os.waitstatus_to_exitcode(os.waitpid(new, 0)[1])
            # It is not killed before it has said why.
            assert ended == (
                -signal.SIGKILL
                if failure == "keeper killed" and server is not die_unprepared
                else 1
            )
        wait_for_exit(keeper)
        assert find_mount(directory) is None


def test_a_dying_server_of_the_new_keeper_holds_nothing_up(tmp_path: Path) -> None:
    """A thread of it waits for the next server, with all descriptors open."""
    directory = tmp_path / "mnt"
    with replaceable(directory, [answer, unmounting(directory)]) as keeper:
        ended, ends = os.pipe()

        def die_held(kept: InheritedMount, _ready: Callable[[], None]) -> None:
            kept.connect()
            server = os.getpid()
            if os.fork():
                os.kill(server, signal.SIGKILL)
            os.close(ends)
            os.read(ended, 1)  # returns at the end of the test

        try:
            new = start_keeper(directory, die_held, replaces=True)
            assert os.waitpid(new, 0)[1] != 0
            wait_for_exit(keeper)
            assert find_mount(directory) is None
        finally:
            os.close(ends)
            os.close(ended)


def test_a_server_that_is_stopped_is_replaced(mount: Mount) -> None:
    stop_process(mount.pid)
    replace(mount)
    assert (mount / "train/d0/000").read_bytes() == FILES[b"d0/000"]


def test_sigterm_of_the_present_keeper_unmounts(tmp_path: Path) -> None:
    directory = tmp_path / "mnt"

    def end_present(kept: InheritedMount, _ready: Callable[[], None]) -> None:
        kept.connect()
        os.kill(present, signal.SIGTERM)
        wait_for(lambda: find_mount(directory) is None, "the end of the mount")

    with replaceable(directory, [answer]) as present:
        new = start_keeper(directory, end_present, replaces=True)
        assert os.waitpid(new, 0)[1] != 0
        wait_for_exit(present)
        assert find_mount(directory) is None


def test_a_mount_that_is_moved_while_it_is_replaced(tmp_path: Path) -> None:
    """Another mount has its path when the new server takes it over."""
    volume = make_volume(tmp_path)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    opening = "    with _opened(volume_uris, options.cache_bytes) as volumes:\n"
    opening += "        numbers = None if inherited is None else inherited.numbers"
    move = f"""
    if inherited is not None:  # not in the mount that is made below
        import subprocess, sys
        os.rename({str(before)!r}, {str(after)!r})
        os.makedirs({str(before / "mnt")!r})
        words = ["mount", {str(volume)!r}, {str(before / "mnt")!r}, "--no-restart", "--json"]
        words += ["--log", {str(tmp_path / "log2")!r}]
        subprocess.run([sys.executable, "-m", "dlfs.cli", *words], check=True)
"""
    with mounted(volume, before / "mnt", tmp_path / "log", fuse="native") as mount:
        try:
            arguments = ("--replace", mount.directory, "--json")
            output = run_copy(
                tmp_path, "mount/server.py", opening, move + opening, "mount", *arguments
            )
            new = json.loads(output)["pid"]
            keeper = parent_of(new)
            wait_for_exit(mount.pid)
            assert (after / "mnt/train/d0/000").read_bytes() == FILES[b"d0/000"]
            os.kill(new, signal.SIGTERM)
            for process in (new, keeper):
                wait_for_exit(process)
            assert find_mount(after / "mnt") is None
            assert (before / "mnt/train/d0/000").read_bytes() == FILES[b"d0/000"]
        finally:
            while find_mount(after / "mnt") is not None:
                detach(str(after / "mnt"))


# ---- processes that are stopped ------------------------------------------------------------------


def descriptor_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exit_code(pid: int) -> int:
    """Wait for the end of a child; it is killed if it does not end."""
    try:
        wait_for_exit(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def test_a_keeper_that_is_stopped_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "ANSWER_SECONDS", 0.2)
    directory = tmp_path / "mnt"
    with replaceable(directory, [answer]) as keeper:
        [server] = children_of(keeper)
        count = descriptor_count(keeper)
        stop_process(keeper)
        for _ in range(2):
            with pytest.raises(
                DeviceError, match=rf"{directory}: .* process {keeper}, .* stopped; 'kill -CONT"
            ):
                Predecessor(*find_dlfs(directory, "replace"))
        os.kill(keeper, signal.SIGCONT)
        monkeypatch.setattr(replacement, "ANSWER_SECONDS", SECONDS_MAX)
        new = start_keeper(directory, die_unprepared, replaces=True)  # admitted after the others
        assert exit_code(new) == 1
        wait_for(lambda: descriptor_count(keeper) == count, "the end of the connections")
        assert children_of(keeper) == [server]
        os.kill(keeper, signal.SIGTERM)


def test_too_many_replacements_of_a_keeper_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "ANSWER_SECONDS", 0.001)
    directory = tmp_path / "mnt"
    with replaceable(directory, [answer]) as keeper:
        stop_process(keeper)
        errors = []
        for _ in range(socket.SOMAXCONN + 2):
            with pytest.raises(DeviceError) as raised:
                Predecessor(*find_dlfs(directory, "replace"))
            errors.append(str(raised.value))
        assert "too many others" in errors[-1]
        os.kill(keeper, signal.SIGCONT)
        os.kill(keeper, signal.SIGTERM)


def test_a_keeper_that_is_stopped_amid_a_replacement_keeps_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the request to kill its server after the new keeper has given up."""
    monkeypatch.setattr(replacement, "ANSWER_SECONDS", 0.2)
    directory = tmp_path / "mnt"

    def stop_present(kept: InheritedMount, _ready: Callable[[], None]) -> None:
        stop_process(present)
        kept.connect()

    with replaceable(directory, [answer]) as present:
        [server] = children_of(present)
        count = descriptor_count(present)
        new = start_keeper(directory, stop_present, replaces=True)
        assert exit_code(new) == 1
        os.kill(present, signal.SIGCONT)
        wait_for(lambda: descriptor_count(present) == count, "the end of the connection")
        assert children_of(present) == [server]
        os.kill(present, signal.SIGTERM)


@pytest.mark.parametrize("answers", [True, False])
def test_a_new_keeper_that_is_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The present one waits for its confirmation; no two servers may answer after that."""
    monkeypatch.setattr(replacement, "PASS_SECONDS", 0.2)
    directory = tmp_path / "mnt"
    pids: SimpleQueue[int] = SimpleQueue()

    def stop_keeper(kept: InheritedMount, ready: Callable[[], None]) -> None:
        pids.put(os.getpid())
        kept.connect()
        stop_process(os.getppid())
        if answers:
            ready()
        signal.pause()

    with replaceable(directory, [answer, unmounting(directory)]) as present:
        new = start_keeper(directory, stop_keeper, replaces=True)
        server = pids.get()
        assert exit_code(new) == -signal.SIGKILL
        for process in (server, present):
            wait_for_exit(process)
        assert find_mount(directory) is None


def test_a_new_server_that_is_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "TAKEOVER_SECONDS", 0.2)
    directory = tmp_path / "mnt"
    pids: SimpleQueue[int] = SimpleQueue()

    def stop(kept: InheritedMount, _ready: Callable[[], None]) -> None:
        pids.put(os.getpid())
        kept.connect()
        os.kill(os.getpid(), signal.SIGSTOP)

    with replaceable(directory, [answer, unmounting(directory)]) as present:
        new = start_keeper(directory, stop, replaces=True)
        assert exit_code(new) == 1
        for process in (pids.get(), present):
            wait_for_exit(process)
        assert find_mount(directory) is None


@pytest.mark.parametrize("connected", [False, True])
def test_others_are_refused_while_a_replacement_hangs(tmp_path: Path, connected: bool) -> None:
    directory = tmp_path / "mnt"
    pids: SimpleQueue[int] = SimpleQueue()

    def hang(kept: InheritedMount, _ready: Callable[[], None]) -> None:
        if connected:
            kept.connect()
        pids.put(os.getpid())
        signal.pause()

    with replaceable(directory, [answer, unmounting(directory)]) as present:
        new = start_keeper(directory, hang, replaces=True)
        pids.get()
        for _ in range(2):
            with pytest.raises(DeviceError, match=f"process {new} has been replacing it for"):
                Predecessor(*find_dlfs(directory, "replace"))
        os.kill(new, signal.SIGTERM)  # as the error says
        assert exit_code(new) == 1
        if not connected:
            os.kill(present, signal.SIGTERM)
        wait_for_exit(present)
        assert find_mount(directory) is None


@pytest.mark.parametrize("stops", ["keeper", "server"])
def test_a_replacement_that_takes_too_long_loses_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    """The one that was stopped changes nothing later."""
    monkeypatch.setattr(replacement, "PREPARE_SECONDS", 0.2)
    directory = tmp_path / "mnt"
    pids: SimpleQueue[int] = SimpleQueue()

    def stop_early(kept: InheritedMount, ready: Callable[[], None]) -> None:
        pids.put(os.getpid())
        os.kill(os.getppid() if stops == "keeper" else os.getpid(), signal.SIGSTOP)
        answer(kept, ready)

    with replaceable(directory, [answer]) as present:
        count = descriptor_count(present)
        first = start_keeper(directory, stop_early, replaces=True)
        server = pids.get()
        wait_for_stop(first if stops == "keeper" else server)
        wait_for(lambda: descriptor_count(present) == count, "the end of the admission")
        second = start_keeper(directory, answer, replaces=True)
        wait_for_exit(present)
        with contextlib.suppress(ProcessLookupError):  # its keeper may have killed it by now
            os.kill(first if stops == "keeper" else server, signal.SIGCONT)
        assert exit_code(first) == 1
        wait_for_exit(server)
        assert len(children_of(second)) == 1
        assert find_mount(directory) is not None
        os.kill(second, signal.SIGTERM)
        assert exit_code(second) == 0
        assert find_mount(directory) is None


def test_a_server_that_is_stopped_before_it_answers_is_replaced(tmp_path: Path) -> None:
    """It follows one that was killed, and programs wait for it."""
    directory = tmp_path / "mnt"

    def answer_and_die(kept: InheritedMount, ready: Callable[[], None]) -> None:
        kept.connect()
        ready()
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(_kept: InheritedMount, _ready: Callable[[], None]) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with replaceable(directory, [answer_and_die, stop]) as present:
        new = start_keeper(directory, unmounting(directory), replaces=True)
        wait_for_exit(present)
        assert exit_code(new) == 0
        assert find_mount(directory) is None


@pytest.mark.parametrize("ends", [False, True])
def test_a_new_server_that_is_stopped_is_ended_by_the_present_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Programs wait for it; its keeper may have ended."""
    monkeypatch.setattr(replacement, "PASS_SECONDS", 3600 if ends else 0.2)
    directory = tmp_path / "mnt"
    pids: SimpleQueue[int] = SimpleQueue()

    def stop(kept: InheritedMount, _ready: Callable[[], None]) -> None:
        kept.connect()
        pids.put(os.getpid())
        if ends:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)

    with replaceable(directory, [answer, unmounting(directory)]) as present:
        new = start_keeper(directory, stop, replaces=True)
        server = pids.get()
        assert exit_code(new) == -signal.SIGKILL
        for process in (server, present):
            wait_for_exit(process)
        assert find_mount(directory) is None
