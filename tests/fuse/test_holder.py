"""The holder: mounts outlive their servers, and the holder, but not both at once.

``DLFS_HOLDER_KILLS`` is the number of processes that are killed under load, a few by default, and
``DLFS_HOLDER_MOUNTS`` that of mounts that one holder gets.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dlfs.errors import (
    DeviceError,
    DlfsError,
    ExistsError,
    LimitError,
    LockedError,
    NotFoundError,
    UsageError,
)
from dlfs.mount.descriptors import receive
from dlfs.mount.mountpoint import detach, device_of, find_mount, mount_file_system
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise import holder as holders
from dlfs.mount.supervise.holder import CONTROL, SERVER, Held, connect, deposit, drop, list_held
from dlfs.mount.supervise.holder_process import CONTROL_LINKS_MAX, LINKS_MAX, Holder
from tests.fuse.keeping import FILES, NEEDS_KEEPER, drop_caches, make_volume, running_programs
from tests.fuse.mounting import SECONDS_MAX, Mount, errno_of, wait_for_exit
from tests.support.namespaces import in_own_mounts
from tests.support.processes import PROCESSES, DlfsProcess
from tests.support.stopping import stop_process
from tests.support.waiting import retried, wait_for

KILLS = int(os.environ.get("DLFS_HOLDER_KILLS", "5"))
MOUNTS = int(os.environ.get("DLFS_HOLDER_MOUNTS", "0"))
FUZZED = 300
OPEN_FILES = 5 + 3
"""Open files of a holder with one mount and no connections, but for pipes, which it inherits:
standard input and errors, poll, lock and control socket; the mount's socket, /dev/fuse, numbers."""
NOBODY = 65534

pytestmark = [*NEEDS_KEEPER, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


def start(*words: Path | str, log: Path) -> DlfsProcess:
    """Start ``dlfs``, which prints nothing to its standard output."""
    process = DlfsProcess(*map(str, words), log=log)
    process.stdout.close()
    return process


class World:
    """A volume, a mount of it, and a holder.

    Attributes:
        folder: the holder's.
        directory: the mount point.
        volume: with the dataset `train` of FILES.
        log: what all processes report.
        holder: the holder's process.
        mount_folder: the folder of the mount at the holder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.directory = folder / "holder", folder / "mnt"
        self.volume, self.log = make_volume(folder), folder / "log"
        self.directory.mkdir()
        self.holder = start("hold", self.folder, log=self.log)
        self.servers: list[DlfsProcess] = []
        self.wait_for_holder()
        self.mount_folder = self.deposit()

    def wait_for_holder(self) -> None:
        """Wait until the holder answers."""

        def answers() -> bool:
            with contextlib.suppress(NotFoundError):
                list_held(self.folder)
                return True
            return False

        wait_for(answers, self.log.read_text)

    def restart_holder(self) -> None:
        """Kill the holder and start another one."""
        self.holder.kill()
        self.holder.wait()
        self.holder = start("hold", self.folder, log=self.log)
        self.wait_for_holder()

    def deposit(self, name: str = "one") -> str:
        """Mount, as a node plugin does, and deposit the mount."""
        kernel = mount_file_system(str(self.directory), MountOptions(allow_other=True).for_kernel())
        try:
            device = device_of(str(self.directory))
            assert device is not None
            return deposit(self.folder, name, kernel, device=device, uid=NOBODY, note="{}")
        finally:
            os.close(kernel)

    def admit_others(self) -> None:
        """Let other users reach the volume and the holder."""
        for part in (self.folder, *self.volume.parents):
            if part != Path("/"):
                part.chmod(part.stat().st_mode | 0o011)
        self.volume.chmod(0o444)

    def serve(self, volume: Path | None = None) -> DlfsProcess:
        """Start a server, without waiting for it."""
        self.servers.append(
            start("mount", "--holder", self.mount_folder, volume or self.volume, log=self.log)
        )
        return self.servers[-1]

    def held(self) -> Held:
        """Return what the holder knows of the mount."""
        (found,) = list_held(self.folder)
        return found

    def wait_until(self, condition: Callable[[Held], bool]) -> None:
        """Wait for a state of the mount at the holder."""
        wait_for(lambda: condition(self.held()), lambda: f"{self.held()}\n{self.log.read_text()}")

    def reads(self, name: str = "d0/000") -> bool:
        """Read a file, by requests to the server. Returns True if its bytes are right."""
        drop_caches()
        return (self.directory / "train" / name).read_bytes() == FILES[name.encode()]

    def end(self) -> None:
        """End everything, whatever its state is."""
        while find_mount(self.directory) is not None:
            detach(str(self.directory))
        for each in [*self.servers, self.holder]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGCONT)
            each.kill()
            each.wait()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.end()


def child_of(keeper: DlfsProcess) -> int:
    """Wait for a keeper's server and return its process ID."""
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children")
    wait_for(children.read_text, "a server")
    return int(children.read_text().split()[0])


def open_files(process: DlfsProcess) -> int:
    """Return the number of a process's open files that are no pipes."""
    count = 0
    for each in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += not os.readlink(each).startswith("pipe:")
    return count


# ---- mounts that go on ---------------------------------------------------------------------------


def test_a_server_without_any_rights(world: World) -> None:
    """It is in a mount namespace that has no such mount, and in its own network namespace."""
    world.admit_others()
    rights = ["--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
    alone = in_own_mounts('exec "$@"', "--net")
    as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *rights]
    words = [sys.executable, "-m", "dlfs.cli", "mount", "--holder", world.mount_folder]
    command = [*alone, *as_nobody, *words, str(world.volume)]
    server = subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE)
    before = os.stat(world.directory / "train/d1/007").st_ino
    assert world.reads()
    opened = os.open(world.directory / "train/d1/007", os.O_RDONLY)
    world.wait_until(lambda held: held.answers and held.uid == NOBODY)
    server.terminate()
    _, errors = server.communicate(timeout=SECONDS_MAX)
    assert server.returncode == 0, errors
    assert find_mount(world.directory) is not None
    assert b"requests come through /dev/fuse" in errors
    world.serve()
    drop_caches()
    assert os.pread(opened, 6000, 0) == FILES[b"d1/007"]
    assert os.stat(world.directory / "train/d1/007").st_ino == before
    os.close(opened)


def run_programs(mount: Mount, end: Connection) -> None:
    with running_programs(mount):
        end.recv()


@contextlib.contextmanager
def programs_elsewhere(mount: Mount) -> Iterator[None]:
    """Run the programs in another process during a block.

    One that waits for a page of a file stops all threads of its process, so it could not start the
    server that it waits for.
    """
    ours, its_own = PROCESSES.Pipe()
    process = PROCESSES.Process(target=run_programs, args=(mount, its_own))
    process.start()
    with ours, its_own:
        yield
        ours.send(None)
        process.join(SECONDS_MAX)
    assert process.exitcode == 0


@pytest.mark.timeout(300 + 10 * KILLS)
def test_rule_54_readers_do_not_notice_what_is_killed(world: World) -> None:
    """Server, keeper and holder, one after the other in any order."""

    def is_served(held: Held) -> bool:
        return held.present and held.answers and held.server_pid == keeper.pid

    draw = random.Random(KILLS)
    keeper = world.serve()
    with programs_elsewhere(Mount(world.volume, world.directory, 0, world.log, "")):
        for kill in range(KILLS):
            world.wait_until(is_served)
            drop_caches()
            victim = ("keeper", "holder", "server")[kill] if kill < 3 else draw.choice("khs")
            if victim.startswith("h"):
                world.restart_holder()
            else:
                pid = keeper.pid if victim.startswith("k") else child_of(keeper)
                os.kill(pid, signal.SIGKILL)
                wait_for_exit(pid)
            if victim.startswith("k"):
                keeper = world.serve()
        world.wait_until(is_served)
    assert world.reads()


def test_rule_55_one_server_at_a_time(world: World) -> None:
    """A stopped one keeps its place until it is killed, also at the next holder."""
    first = world.serve()
    assert world.reads()
    child = child_of(first)
    for pid in (first.pid, child):
        stop_process(pid)
    second = world.serve()
    world.wait_until(lambda held: held.waiting == 1 and held.server_pid == first.pid)
    first.kill()
    wait_for_exit(child)
    assert world.reads("d0/001")
    world.wait_until(lambda held: held.server_pid == second.pid)
    world.restart_holder()
    third = world.serve()
    world.wait_until(lambda held: held.waiting == 1 and held.server_pid == second.pid)
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 0
    assert world.reads("d0/002")
    assert world.held().server_pid == third.pid


def test_a_server_that_fails_leaves_the_mount_to_the_next(world: World, tmp_path: Path) -> None:
    """The first has read the first request of the kernel, which is answered once."""
    first = world.serve(tmp_path / "missing.img")
    assert first.wait() == 3
    assert "missing.img" in world.log.read_text()
    world.serve()
    assert world.reads()
    assert world.held().answers


def test_servers_work_while_the_holder_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = world.serve()
    assert world.reads()
    stop_process(world.holder.pid)
    monkeypatch.setattr(holders, "_ANSWER_SECONDS", 0.1)
    with pytest.raises(DeviceError, match=r"no answer within 0\.1 s"):
        list_held(world.folder)
    os.kill(child_of(server), signal.SIGKILL)
    assert world.reads("d0/001")
    os.kill(world.holder.pid, signal.SIGCONT)


# ---- mounts that end -----------------------------------------------------------------------------


def test_what_is_unmounted_is_forgotten(world: World) -> None:
    """With a server and another that waits, or without one."""
    wait_for(lambda: open_files(world.holder) == OPEN_FILES, "the end of connections to the holder")
    before = OPEN_FILES - 3  # those of the mount
    for number in range(2):
        servers = [world.serve() for _ in range(2)] if number == 0 else []
        if servers:
            assert world.reads()
            world.wait_until(lambda held: held.waiting == 1)
        detach(str(world.directory))
        for server in servers:
            assert server.wait() == 0
        wait_for(lambda: not list_held(world.folder), "the holder")
        wait_for(lambda: open_files(world.holder) == before, "the end of connections to the holder")
        assert not os.listdir(world.folder / "mounts") + os.listdir(world.folder / "state")
        world.deposit()


def test_a_mount_without_any_process_is_dead(world: World) -> None:
    """The next holder knows its name, and the node plugin may mount anew under it."""
    server = world.serve()
    assert world.reads()
    child = child_of(server)
    world.holder.kill()
    server.kill()
    for pid in (child, server.pid, world.holder.pid):
        wait_for_exit(pid)
    assert errno_of(lambda: os.listdir(world.directory)) == errno.ENOTCONN
    world.restart_holder()
    assert not world.held().present
    world.serve()
    world.wait_until(lambda held: held.waiting == 1)
    detach(str(world.directory))
    world.deposit()
    assert world.reads()
    assert drop(world.folder, "one")
    assert not drop(world.folder, "one")
    assert world.reads("d0/001")  # its server has it


# ---- what is refused -----------------------------------------------------------------------------


def test_servers_that_are_refused(world: World, tmp_path: Path) -> None:
    def refusal(folder: Path | str, *more: str) -> str:
        words = ["mount", *more, "--holder", folder, world.volume]
        server = start(*words, log=tmp_path / "refused")
        assert server.wait() != 0
        return (tmp_path / "refused").read_text().splitlines()[-1]

    assert "no such folder; expected FOLDER/mounts/NAME of a holder" in refusal(tmp_path / "two")
    assert "leave --allow-other out" in refusal(world.mount_folder, "--allow-other")
    world.admit_others()
    links = [link_to(world.mount_folder, SERVER) for _ in range(LINKS_MAX)]
    assert f"expected at most {LINKS_MAX} connections" in refusal(world.mount_folder)
    for link in links:
        link.close()
    with as_user(NOBODY - 1), link_to(world.mount_folder, SERVER) as link:
        answer = ask(link, {"op": "serve"})
    assert answer["message"] == f"only root and user {NOBODY} may, got user {NOBODY - 1}"
    with as_user(NOBODY), pytest.raises(DeviceError, match="Permission denied"):
        list_held(world.folder)


def test_many_calls_wait_their_turn(world: World) -> None:
    links = [link_to(world.folder, CONTROL) for _ in range(CONTROL_LINKS_MAX)]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(list_held, world.folder)
        for link in links:
            assert ask(link, {"op": "list", "after": ""})["mounts"]
            link.close()
        assert [held.name for held in found.result()] == ["one"]


def test_deposits_that_are_refused(world: World, tmp_path: Path) -> None:
    device = world.held().device

    def refusal(kernel: int, **changed: Any) -> DlfsError:
        words: dict[str, Any] = {"name": "two", "device": "0:1", "uid": 0} | changed
        with pytest.raises(DlfsError) as caught:
            deposit(world.folder, words.pop("name"), kernel, **words)
        return caught.value

    other = tmp_path / "other"
    other.mkdir()
    kernel = mount_file_system(str(other), MountOptions().for_kernel())
    assert isinstance(refusal(kernel, name="one"), ExistsError)
    assert deposit(world.folder, "one", kernel, device=device, uid=0) == world.mount_folder
    assert "expected a name that matches" in str(refusal(kernel, name="../one"))
    assert isinstance(refusal(kernel, note="x" * 4097), LimitError)
    assert "expected uid of type int" in str(refusal(kernel, uid="root"))
    detach(str(other))
    assert "that is mounted, got one that is not" in str(refusal(kernel))
    with open(os.devnull) as null, open("/dev/fuse", "rb+", buffering=0) as unused:
        assert "expected a descriptor of /dev/fuse" in str(refusal(null.fileno()))
        assert "that is mounted, got one that is not" in str(refusal(unused.fileno()))
    os.close(kernel)
    assert [each.name for each in list_held(world.folder)] == ["one"]
    with pytest.raises(NotFoundError, match="none runs there; 'dlfs hold "):
        list_held(tmp_path / "none")
    with pytest.raises(LockedError, match="another holder does"):
        Holder(str(world.folder))


def test_a_holder_has_as_many_mounts_as_it_may(tmp_path: Path) -> None:
    """By default few, since the system permits few open files."""
    count = MOUNTS or 3
    if not MOUNTS:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert hard > 62
    log, folder = tmp_path / "log", tmp_path / "holder"
    words = [sys.executable, "-m", "dlfs.cli", "hold", str(folder)]
    limit = [] if MOUNTS else ["prlimit", "--nofile=62"]
    with log.open("ab") as errors, subprocess.Popen([*limit, *words], stderr=errors) as holder:
        wait_for((folder / CONTROL).exists, log.read_text)
        with contextlib.ExitStack() as stack:
            stack.callback(holder.kill)
            for number in range(count):
                directory = tmp_path / str(number)
                directory.mkdir()
                kernel = mount_file_system(str(directory), MountOptions().for_kernel())
                stack.callback(os.close, kernel)
                stack.callback(detach, str(directory))
                deposit(folder, f"m{number}", kernel, device=f"0:{number}", uid=0, note="x" * 4096)
            assert len(list_held(folder)) == count
            with pytest.raises(LimitError, match=rf"holds {count} mounts, and no more"):
                deposit(folder, "more", kernel, device="0:9999", uid=0)


# ---- peers that are not to be trusted ------------------------------------------------------------


def link_to(folder: Path | str, name: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(SECONDS_MAX)
    try:
        connect(link, str(folder), name)
    except BaseException:
        link.close()
        raise
    return link


def ask(link: socket.socket, words: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(BrokenPipeError):  # it may have refused already
        holders.send(link, words)
    return holders.parse(receive(link, holders.MESSAGE_BYTES_MAX, 2)[0])


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Be another user in a block, for the system's checks of this thread."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def garbage(draw: random.Random) -> bytes:
    """Return a message that a peer should not send."""
    words: dict[str, Any] = {
        key: draw.choice(["", "one", "0:1", -1, 2**70, None, [], {}, True, "\udc80", "z" * 99999])
        for key in draw.sample(["name", "device", "uid", "note", "init", "answers", "after"], 5)
    }
    words["op"] = draw.choice(["deposit", "drop", "list", "serve", "init", "ready", [], ""])
    message = json.dumps(words).encode()
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 3000))
    return message[: draw.randrange(1, len(message))] if kind == 1 else message


def test_garbage_changes_nothing(world: World) -> None:
    """Nor do descriptors in it, silent peers, or a server that sends it without end."""
    server = world.serve()
    assert world.reads()
    draw = random.Random(1)
    with open(os.devnull) as null:
        for number in range(FUZZED):
            where = (world.folder, CONTROL) if number % 2 else (world.mount_folder, SERVER)
            with retried(functools.partial(link_to, *where), BlockingIOError) as link:
                for _ in range(draw.randrange(4)):
                    message = garbage(draw)
                    if b'"drop"' not in message:
                        count = draw.choice([0, 1, 2, 9])
                        with contextlib.suppress(OSError):  # refused already, or too long
                            socket.send_fds(link, [message], [null.fileno()] * count)
    wait_for(lambda: open_files(world.holder) == OPEN_FILES + 1, "the holder to close them")
    assert world.holder.poll() is None
    assert world.held().server_pid == server.pid
    assert world.reads("d0/001")


def test_a_server_that_sends_without_end_keeps_its_place(world: World) -> None:
    with link_to(world.mount_folder, SERVER) as link:
        answer = ask(link, {"op": "serve"})
        assert (answer["name"], answer["init"]) == ("one", "")
        link.setblocking(False)
        for _ in range(3):
            with contextlib.suppress(BlockingIOError):
                for _ in range(10_000):
                    link.send(b"x")
            assert world.held().server_pid == os.getpid()
    world.wait_until(lambda held: held.server_pid is None)


def test_a_server_gives_back_its_own_mount_only(world: World, tmp_path: Path) -> None:
    """Otherwise the next server would show its volume on a mount of somebody else."""
    shutil.copytree(world.folder / "state", tmp_path / "state")
    other = tmp_path / "other"
    other.mkdir()
    kernel = mount_file_system(str(other), MountOptions().for_kernel())
    numbers = os.memfd_create("numbers")
    world.restart_holder()  # no server has the mount: it is gone

    def give_back(device: str, *descriptors: int) -> dict[str, Any]:
        words = {"op": "serve", "device": device, "init": "", "answers": True}
        with link_to(world.mount_folder, SERVER) as link:
            holders.send(link, words, descriptors)
            return holders.parse(receive(link, holders.MESSAGE_BYTES_MAX, 0)[0])

    device = world.held().device
    assert "expected the mount of device" in give_back("0:1", kernel, numbers)["message"]
    assert "expected a descriptor of /dev/fuse" in give_back(device, numbers, kernel)["message"]
    assert "expected the memory" in give_back(device, kernel)["message"]
    assert not world.held().present
    detach(str(other))
    assert "that is mounted" in give_back(device, kernel, numbers)["message"]
    for descriptor in (kernel, numbers):
        os.close(descriptor)
    with pytest.raises(UsageError, match="expected a JSON object"):
        holders.parse(b"[]")
