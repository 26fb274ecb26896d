"""The keeper of a mount: programs do not notice that servers die. The mounts refuse io_uring.

``DLFS_SERVER_KILLS`` is the number of servers that are killed under load, and ``DLFS_SERVER_STOPS``
of mounts that are ended; a few by default.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import SimpleQueue
from pathlib import Path
from typing import Any, NoReturn

import pytest

import dlfs
from dlfs._native.mounting import mount as mount_call
from dlfs.base.units import MIB
from dlfs.errors import DeviceError
from dlfs.mount import mountpoint as mountpoints
from dlfs.mount.mountpoint import detach, find_mount, is_dead, unmount
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise import keeper as keepers
from dlfs.mount.supervise.background import replace_server
from dlfs.mount.supervise.inherited import InheritedMount
from dlfs.mount.supervise.keeper import YOUNG_SECONDS, Server
from dlfs.mount.supervise.processes import is_dying
from tests.fuse.keeping import (
    FILES,
    NEEDS_KEEPER,
    drop_caches,
    kept,
    make_volume,
    running_programs,
    unmounting,
)
from tests.fuse.mounting import (
    SECONDS_MAX,
    Mount,
    add_dataset,
    errno_of,
    mounted,
    parent_of,
    run_cli,
    stopped,
    wait_for_exit,
)
from tests.support.waiting import wait_for

KILLS = int(os.environ.get("DLFS_SERVER_KILLS", "4"))
STOPS = int(os.environ.get("DLFS_SERVER_STOPS", "2"))
WALKS = 4
TRIES_MAX = 100
"""Most mounts that are made until one has the numbers of another that is gone."""
END_SECONDS = 5
"""Longest time for requests to end after keeper and server are killed, in seconds."""
DUMP_SECONDS = 30
DUMPS_MAX = 8
KILLS_IN_A_ROW = 8
"""Servers that are killed young, one after the other, since the keeper's pauses get longer."""

pytestmark = NEEDS_KEEPER


def children_of(keeper: int) -> list[str]:
    return Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()


def server_of(keeper: int) -> int:
    """Wait for the keeper's server and return its process ID."""
    wait_for(lambda: bool(children_of(keeper)), "a server")
    return int(children_of(keeper)[0])


def kill_server(mount: Mount, keeper: int, number: int = signal.SIGKILL) -> None:
    """Kill the keeper's server and wait until the keeper has noticed."""
    deaths = mount.log.read_text().count("the server died")
    os.kill(server_of(keeper), number)
    wait_for(lambda: mount.log.read_text().count("the server died") > deaths, "the keeper")


@contextlib.contextmanager
def datasets_coming_and_going(mount: Mount) -> Iterator[None]:
    """Import, seal and remove datasets in a block, as other programs do."""
    ended = threading.Event()

    def repeat() -> int:
        count = 0
        while not ended.is_set():
            add_dataset(mount.volume, "coming", {b"x": b"%d" % count})
            (mount / "incoming/sealed").mkdir()
            (mount / "incoming/sealed/x").write_bytes(b"%d" % count)
            # The server may be killed: the next one puts the directory back, unless it is sealed.
            while run_cli("seal", mount.directory, "sealed").returncode != 0:
                wait_for(lambda: is_back() or is_sealed(), "what was not sealed")
                if is_sealed():
                    break
            with dlfs.open(str(mount.volume)) as volume:
                volume.remove("coming")
                assert volume["sealed"].get("x") == b"%d" % count
                volume.remove("sealed")
            count += 1
        return count

    def is_back() -> bool:
        return os.path.lexists(mount / "incoming/sealed")

    def is_sealed() -> bool:
        with dlfs.open(str(mount.volume)) as volume:
            return "sealed" in volume

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(repeat)
        try:
            yield
        finally:
            ended.set()
        running.result()


@pytest.mark.timeout(300 + 20 * KILLS)
def test_programs_do_not_notice_servers_that_are_killed(tmp_path: Path) -> None:
    def has_answered(servers: int) -> bool:
        return mount.log.read_text().count("another server answers") >= servers

    options = {"fuse": "native", "incoming": str(tmp_path / "staging")}
    with mounted(make_volume(tmp_path), tmp_path / "mnt", tmp_path / "log", **options) as mount:
        keeper = parent_of(mount.pid)
        with running_programs(mount), datasets_coming_and_going(mount):
            for kill in range(1, KILLS + 1):
                if kill % KILLS_IN_A_ROW == 0:
                    time.sleep(YOUNG_SECONDS)
                drop_caches()
                kill_server(mount, keeper)
                wait_for(functools.partial(has_answered, kill), "a server")


@pytest.mark.timeout(300 + 20 * KILLS)
def test_keeper_and_server_that_are_killed_at_once(tmp_path: Path) -> None:
    """Every request under way ends, and the next mount serves."""
    volume, directory = make_volume(tmp_path), tmp_path / "mnt"
    for number in range(KILLS):
        with mounted(volume, directory, tmp_path / "log", fuse="native") as mount:
            keeper = parent_of(mount.pid)
            readers = [
                subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                for words in (
                    ["tar", "c", "-f", "-", "-C", directory, "train"],
                    ["find", directory / "train", "-size", "+0"],
                    ["grep", "-r", "nothing", directory / "train"],
                )
            ]
            select.select([], [], [], random.Random(number).random() / 10)
            for process in (keeper, mount.pid):
                os.kill(process, signal.SIGKILL)
            deadline = time.monotonic() + END_SECONDS
            for reader in readers:
                reader.wait(max(0.01, deadline - time.monotonic()))
            wait_for_exit(mount.pid)
            assert is_dead(directory)


def test_what_a_program_has_open_goes_on(mount: Mount) -> None:
    add_dataset(mount.volume, "other", {b"x": b"other"})
    wait_for(lambda: (mount / "other/x").exists(), "the dataset")
    before = os.stat(mount / "train/d1/007").st_ino
    folder = os.open(mount / "train/d1", os.O_RDONLY | os.O_DIRECTORY)
    opened = os.open(mount / "train/d1/007", os.O_RDONLY)
    removed = os.open(mount / "other", os.O_RDONLY | os.O_DIRECTORY)
    with dlfs.open(str(mount.volume)) as volume:
        volume.remove("other")
    keeper = parent_of(mount.pid)
    kill_server(mount, keeper)
    drop_caches()
    assert os.pread(opened, 6000, 0) == FILES[b"d1/007"]
    beside = os.open("008", os.O_RDONLY, dir_fd=folder)
    assert os.read(beside, 6000) == FILES[b"d1/008"]
    assert len(os.listdir(folder)) == 50
    assert os.stat(mount / "train/d1/007").st_ino == before
    add_dataset(mount.volume, "younger", {b"x": b"younger"})
    wait_for(lambda: (mount / "younger/x").exists(), "the dataset")
    assert (mount / "younger/x").read_bytes() == b"younger"
    assert errno_of(lambda: os.stat(mount / "other/x")) == errno.ENOENT
    assert errno_of(lambda: os.getxattr(removed, "user.dlfs.version")) == errno.ESTALE
    assert errno_of(lambda: os.listxattr(removed)) == errno.ESTALE
    for descriptor in (folder, opened, removed, beside):
        os.close(descriptor)


def test_what_is_written_to_incoming_needs_no_server(mount: Mount, tmp_path: Path) -> None:
    options = {"fuse": "native", "incoming": str(tmp_path / "staging")}
    with mounted(mount.volume, tmp_path / "both", tmp_path / "log2", **options) as both:
        new = both / "incoming/new"
        new.mkdir()
        (new / "a").write_bytes(b"a")
        opened = os.open(both / "train/d1/007", os.O_RDONLY)
        with (new / "b").open("wb", buffering=0) as file:
            file.write(b"b")
            kill_server(both, parent_of(both.pid))
            file.write(b"c")
            drop_caches()
            assert os.pread(opened, 6000, 0) == FILES[b"d1/007"]
        os.close(opened)
        assert {file.name: file.read_bytes() for file in new.iterdir()} == {"a": b"a", "b": b"bc"}
        wait_for(lambda: run_cli("seal", both.directory, "new").returncode == 0, "the next server")
        assert (both / "new/b").read_bytes() == b"bc"


@pytest.mark.parametrize("of_keeper", [True, False])
def test_sigterm_unmounts(mount: Mount, of_keeper: bool) -> None:
    keeper = parent_of(mount.pid)
    kill_server(mount, keeper)
    server = server_of(keeper)
    assert (mount / "train/d0/000").read_bytes() == FILES[b"d0/000"]
    os.kill(keeper if of_keeper else server, signal.SIGTERM)
    for process in (server, keeper):
        wait_for_exit(process)
    assert find_mount(mount.directory) is None


def test_without_a_keeper(mount: Mount, tmp_path: Path) -> None:
    options = {"fuse": "native", "restart": False}
    with mounted(mount.volume, tmp_path / "plain", tmp_path / "log", **options) as plain:
        assert parent_of(plain.pid) == 1
        os.kill(plain.pid, signal.SIGKILL)
        wait_for_exit(plain.pid)
        assert errno_of(lambda: os.listdir(plain.directory)) == errno.ENOTCONN


def die(kept: InheritedMount, _ready: Callable[[], None]) -> None:
    kept.connect()
    os.kill(os.getpid(), signal.SIGKILL)


def answer_and_die(kept: InheritedMount, ready: Callable[[], None]) -> None:
    kept.connect()
    ready()
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_kept: InheritedMount, _ready: Callable[[], None]) -> None:
    raise DeviceError("a device of the volume is away")


class Refusing:
    """The module os, in which some calls of fork fail as if there were too many processes."""

    def __init__(self, forks: set[int]) -> None:
        self._refused = forks
        self._forks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fork(self) -> int:
        self._forks += 1
        if self._forks in self._refused:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return os.fork()


@pytest.mark.parametrize("then", [answer_and_die, fail])
def test_servers_that_die_again_and_again_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Server
) -> None:
    monkeypatch.setattr(keepers, "PAUSE_SECONDS_MIN", 0.05)
    monkeypatch.setattr(keepers, "FAILING_SECONDS_MAX", 0.5)
    started: SimpleQueue[None] = SimpleQueue()

    def count(kept: InheritedMount, ready: Callable[[], None]) -> None:
        started.put(None)
        then(kept, ready)

    with kept(tmp_path / "mnt", [answer_and_die, *[count] * 100]) as keeper:
        wait_for_exit(keeper)
        while (failed := errno_of(lambda: os.listdir(tmp_path / "mnt"))) != errno.ENOTCONN:
            assert failed == errno.ECONNABORTED  # the guard is ending
    starts = 0
    while not started.empty():
        started.get()
        starts += 1
    # Pauses of 0.05 s, 0.1 s, 0.2 s and 0.4 s: others only begin when it is over.
    assert 1 <= starts <= 6


def test_a_mount_outlasts_a_device_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "PAUSE_SECONDS_MIN", 0.01)

    servers = [answer_and_die, *[fail] * 6, unmounting(tmp_path / "mnt")]
    with kept(tmp_path / "mnt", servers) as keeper:
        wait_for_exit(keeper)
        assert find_mount(tmp_path / "mnt") is None


def test_a_mount_outlasts_a_lack_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to start a server, until it has room again."""
    monkeypatch.setattr(keepers, "PAUSE_SECONDS_MIN", 0.01)
    monkeypatch.setattr(keepers, "os", Refusing(forks={2, 3}))
    with kept(tmp_path / "mnt", [answer_and_die, unmounting(tmp_path / "mnt")]) as keeper:
        wait_for_exit(keeper)
        assert find_mount(tmp_path / "mnt") is None


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_pause_ends_with_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals | None
) -> None:
    """SIGTERM ends it at once; an unmount by another program leaves nothing to do after it."""
    monkeypatch.setattr(keepers, "PAUSE_SECONDS_MAX", 2 if number is None else 3600)
    monkeypatch.setattr(keepers, "PAUSE_SECONDS_MIN", keepers.PAUSE_SECONDS_MAX)
    started: SimpleQueue[None] = SimpleQueue()

    def answer(kept: InheritedMount, ready: Callable[[], None]) -> None:
        started.put(None)
        answer_and_die(kept, ready)

    with kept(tmp_path / "mnt", [answer, answer]) as keeper:
        assert [started.get() for _ in range(2)] == [None, None]
        wait_for(lambda: not children_of(keeper), "the pause")
        if number is None:
            detach(str(tmp_path / "mnt"))
        else:
            os.kill(keeper, number)
        wait_for_exit(keeper)
        assert find_mount(tmp_path / "mnt") is None


def test_a_mount_that_never_answered_is_detached(tmp_path: Path) -> None:
    with kept(tmp_path / "mnt", [die]) as keeper:
        wait_for_exit(keeper)
        assert find_mount(tmp_path / "mnt") is None


def test_sigterm_while_a_server_starts_unmounts(tmp_path: Path) -> None:
    starts: SimpleQueue[None] = SimpleQueue()

    def start(_kept: InheritedMount, _ready: Callable[[], None]) -> None:
        starts.put(None)
        signal.pause()

    with kept(tmp_path / "mnt", [answer_and_die, start]) as keeper:
        assert starts.get() is None
        os.kill(keeper, signal.SIGTERM)
        wait_for_exit(keeper)
        assert find_mount(tmp_path / "mnt") is None


def test_a_server_that_dies_before_it_takes_the_mount_is_replaced(tmp_path: Path) -> None:
    def die_unread(kept: InheritedMount, _ready: Callable[[], None]) -> None:
        def await_message(link: socket.socket, *_sizes: int) -> NoReturn:
            select.select([link], [], [])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        keepers.receive = await_message
        kept.connect()

    servers = [answer_and_die, die_unread, unmounting(tmp_path / "mnt")]
    with kept(tmp_path / "mnt", servers) as keeper:
        wait_for_exit(keeper)
        assert find_mount(tmp_path / "mnt") is None


def test_a_server_that_cannot_end_is_replaced(tmp_path: Path) -> None:
    """Its first thread ends, as when it is killed while another waits for the next server."""
    starts: SimpleQueue[int] = SimpleQueue()

    def leave_thread(kept: InheritedMount, ready: Callable[[], None]) -> None:
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        starts.put(os.getpid())
        kept.connect()
        ready()
        ctypes.CDLL(None).pthread_exit(None)

    def unmounts(kept: InheritedMount, _ready: Callable[[], None]) -> None:
        kept.connect()
        detach(str(tmp_path / "mnt"))

    with kept(tmp_path / "mnt", [leave_thread, unmounts]) as keeper:
        undead = starts.get()
        try:
            wait_for_exit(keeper)
            assert find_mount(tmp_path / "mnt") is None
        finally:
            os.kill(undead, signal.SIGKILL)


@pytest.mark.parametrize("number", range(STOPS))
def test_a_mount_that_is_walked_ends(tmp_path: Path, number: int) -> None:
    volume = tmp_path / "volume.img"
    dlfs.format_volume(str(volume), size_bytes=32 * MIB)
    add_dataset(volume, "walked", {b"%05d" % file: bytes(file) for file in range(4000)})
    draw = random.Random(number)
    with mounted(volume, tmp_path / "mnt", tmp_path / "log", fuse="native") as mount:
        keeper = parent_of(mount.pid)
        walks = [
            subprocess.Popen(
                ["tar", "c", "-f", "-", "-C", mount.directory, "walked"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(WALKS)
        ]
        time.sleep(draw.random() / 2)
        if draw.random() < 0.5:
            unmount(mount.directory, lazy=True)
        with contextlib.suppress(ProcessLookupError):  # the unmount may have ended it
            os.kill(draw.choice([keeper, mount.pid]), signal.SIGTERM)
        for process in (mount.pid, keeper):
            wait_for_exit(process)
        for walk in walks:
            walk.wait(SECONDS_MAX)
        assert find_mount(mount.directory) is None


def test_what_a_dying_thread_has_taken_is_sent_again(tmp_path: Path) -> None:
    """A thread of a dead server takes a request after the next server has answered."""
    starts, says = os.pipe()

    def leave_thread(kept: InheritedMount, ready: Callable[[], None]) -> None:
        connection = kept.connect()
        unique = connection.init[8:16]
        answer = struct.pack("=4I2H2I", 7, 31, 4096, 0, 16, 16, 4096, 1)
        header = struct.pack("=Ii8s", 16 + 64, 0, unique)
        os.write(connection.descriptor, header + answer.ljust(64, b"\0"))

        def take() -> None:
            os.read(connection.descriptor, MIB)
            os.write(says, b"%d\n" % os.getpid())
            time.sleep(3600)

        threading.Thread(target=take, daemon=True).start()
        ready()
        ctypes.CDLL(None).pthread_exit(None)

    def await_request(kept: InheritedMount, ready: Callable[[], None]) -> None:
        connection = kept.connect()
        ready()
        subprocess.Popen(["stat", tmp_path / "mnt"], stderr=subprocess.DEVNULL)
        if select.select([starts], [], [], SECONDS_MAX)[0]:
            os.kill(int(os.read(starts, 20)), signal.SIGKILL)
            if select.select([connection.descriptor], [], [], SECONDS_MAX)[0]:
                os.write(says, b"again")
        detach(str(tmp_path / "mnt"))

    with kept(tmp_path / "mnt", [leave_thread, await_request]) as keeper:
        wait_for_exit(keeper)
        assert select.select([starts], [], [], 0)[0]
        assert os.read(starts, 20) == b"again"
    os.close(starts)
    os.close(says)


def test_a_mount_whose_server_is_stopped_is_unmounted(mount: Mount) -> None:
    with stopped(mount):
        assert run_cli("umount", "--lazy", mount.directory).returncode == 0
        assert find_mount(mount.directory) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_core_dump_holds_no_program_up(mount: Mount) -> None:
    """The program that gets the memory of the server takes its time."""
    pattern = Path("/proc/sys/kernel/core_pattern")
    before = pattern.read_text()
    keeper = parent_of(mount.pid)
    for number in range(DUMPS_MAX):  # a signal may cut a dump short
        server = mount.pid
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(server, resource.RLIMIT_CORE, unlimited)
        pattern.write_text(f"|{shutil.which('sleep')} {DUMP_SECONDS}")
        try:
            os.kill(server, signal.SIGSEGV)
            wait_for(lambda server=server: is_dying(server), "the dump")
            drop_caches()
            name = f"{number:03}"
            assert (mount / "train/d0" / name).read_bytes() == FILES[b"d0/" + name.encode()]
            dumped = is_dumping(server)
        finally:
            pattern.write_text(before)
        mount.pid = int(children_of(keeper)[-1])
        if dumped:
            break
    assert dumped
    assert run_cli("umount", mount.directory).returncode == 0
    wait_for_exit(keeper)


def is_dumping(pid: int) -> bool:
    try:
        return "CoreDumping:\t1" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# ---- mounts that the caller has made -------------------------------------------------------------


@contextlib.contextmanager
def made_mount(directory: Path) -> Iterator[int]:
    """Mount as a node plugin does; yield the descriptor of /dev/fuse."""
    directory.mkdir(exist_ok=True)
    kernel = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    try:
        data = f"fd={kernel},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
        mount_call("dlfs", str(directory), "fuse.dlfs", 1, data)
        yield kernel
    finally:
        while find_mount(directory) is not None:
            detach(str(directory))
        os.close(kernel)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_mount_that_the_caller_has_made(tmp_path: Path) -> None:
    volume, directory = make_volume(tmp_path), tmp_path / "mnt"
    with made_mount(directory) as kernel:
        done = run_cli(
            "mount", volume, directory, "--no-uring", "--json", "--log", tmp_path / "log",
            "--fuse-fd", kernel, pass_fds=[kernel],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        server = json.loads(done.stdout)["pid"]
        keeper = parent_of(server)
        assert (directory / "train/d0/000").read_bytes() == FILES[b"d0/000"]
        os.kill(server, signal.SIGKILL)
        drop_caches()
        assert (directory / "train/d0/001").read_bytes() == FILES[b"d0/001"]
        again = run_cli(
            "mount", volume, directory, "--no-uring", "--fuse-fd", kernel, pass_fds=[kernel]
        )
        assert "a server has answered" in again.stderr or "was in use" in again.stderr
        assert run_cli("umount", directory).returncode == 0
        for process in (server, keeper):
            wait_for_exit(process)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_descriptors_that_are_no_new_mount(tmp_path: Path) -> None:
    volume, directory = make_volume(tmp_path), tmp_path / "mnt"
    directory.mkdir()

    def refusal(descriptor: int) -> str:
        words = ("mount", volume, directory, "--no-uring", "--log", tmp_path / "log", "--fuse-fd")
        done = run_cli(*words, descriptor, pass_fds=[descriptor])
        assert done.returncode == 2, done.stderr
        return str(done.stderr)

    with open(os.devnull) as other, made_mount(tmp_path / "elsewhere") as kernel:
        assert "of the type fuse.dlfs" in refusal(kernel)
        with made_mount(directory):
            assert "descriptor of /dev/fuse, got /dev/null" in refusal(other.fileno())


# ---- a directory above the mount point is renamed ------------------------------------------------


@contextlib.contextmanager
def moved_mount(folder: Path, **options: object) -> Iterator[tuple[Mount, Mount]]:
    """Mount, rename a directory above, and mount at the old path; yield both mounts, ours first."""
    volume = make_volume(folder)
    before, after = folder / "before", folder / "after"
    before.mkdir()
    with contextlib.ExitStack() as stack:
        options |= {"fuse": "native"}
        log = folder / "log"
        moved = stack.enter_context(mounted(volume, before / "mnt", log, **options))
        keeper = parent_of(moved.pid)
        stack.callback(end_keeper, after / "mnt", keeper)
        before.rename(after)
        moved.directory = after / "mnt"
        before.mkdir()
        other = stack.enter_context(
            mounted(volume, before / "mnt", folder / "log2", fuse="native", restart=False)
        )
        yield moved, other
        assert (other / "train/d0/000").read_bytes() == FILES[b"d0/000"]


def end_keeper(directory: Path, keeper: int) -> None:
    """Unmount what a failed test has left, and wait for the end of its keeper."""
    while find_mount(directory) is not None:
        detach(str(directory))
    wait_for_exit(keeper)


def test_servers_and_replacements_follow_a_mount_that_is_moved(tmp_path: Path) -> None:
    with moved_mount(tmp_path) as (mount, _):
        keeper = parent_of(mount.pid)
        for _ in range(2):  # by the keeper that has mounted it, and by its successor
            kill_server(mount, keeper)
            drop_caches()
            assert (mount / "train/d1/007").read_bytes() == FILES[b"d1/007"]
            mount.pid = replace_server(mount.directory).pid
            wait_for_exit(keeper)
            keeper = parent_of(mount.pid)
        assert (mount / "train/d1/008").read_bytes() == FILES[b"d1/008"]
        assert run_cli("umount", mount.directory).returncode == 0
        for process in (mount.pid, keeper):
            wait_for_exit(process)


@pytest.mark.parametrize("of_keeper", [True, False])
def test_sigterm_unmounts_a_mount_that_was_moved(tmp_path: Path, of_keeper: bool) -> None:
    with moved_mount(tmp_path) as (mount, other):
        keeper = parent_of(mount.pid)
        os.kill(keeper if of_keeper else mount.pid, signal.SIGTERM)
        for process in (mount.pid, keeper):
            wait_for_exit(process)
        assert find_mount(mount.directory) is None
        assert find_mount(other.directory) is not None


def test_a_moved_mount_with_incoming(tmp_path: Path) -> None:
    with moved_mount(tmp_path, incoming=str(tmp_path / "staging")) as (mount, _):
        keeper = parent_of(mount.pid)
        (mount / "incoming/new").mkdir()
        kill_server(mount, keeper)
        (mount / "incoming/new/a").write_bytes(b"a")
        os.kill(keeper, signal.SIGTERM)
        wait_for_exit(keeper)
        assert find_mount(mount.directory) is None
        assert (tmp_path / "staging/new/a").read_bytes() == b"a"


def test_a_keeper_leaves_the_next_mount_on_its_path(tmp_path: Path) -> None:
    """It has the numbers of a mount that is gone, whose server has not ended yet."""
    directory = tmp_path / "mnt"
    records = tmp_path / "records"

    def be_followed(kept: InheritedMount, ready: Callable[[], None]) -> None:
        kept.connect()
        ready()
        before = find_mount(directory)
        for _ in range(TRIES_MAX):  # other mounts of the machine may take the numbers
            unmount(directory, lazy=True)
            mountpoints.mount_file_system(str(directory), MountOptions().for_kernel())
            if find_mount(directory) == before:
                break
            time.sleep(0.05)
        records.write_text(f"{before}\n{find_mount(directory)}\n")
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    with kept(directory, [be_followed]) as keeper:
        wait_for_exit(keeper)
        before, after = records.read_text().splitlines()
        if before != after:
            pytest.skip(f"the kernel gave the numbers of {before} to another mount")
        found = find_mount(directory)
        assert str(found) == after


def test_a_mount_that_does_not_answer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mountpoints, "_ANSWER_TIMEOUT_S", 0.2)
    directory = tmp_path / "mnt"

    def be_silent(kept: InheritedMount, ready: Callable[[], None]) -> None:
        kept.connect()
        ready()
        signal.pause()

    with kept(directory, [be_silent]) as keeper:
        wait_for(lambda: find_mount(directory) is not None, "the mount")
        with pytest.raises(DeviceError, match=r"answer within 0\.2 s, got none.*umount --lazy"):
            mountpoints.prepare(directory)
        os.kill(keeper, signal.SIGTERM)
