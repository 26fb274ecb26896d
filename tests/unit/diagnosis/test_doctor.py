"""Each misconfiguration that is planted is found, with its source and its fix; and nothing else."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import dlfs
from dlfs._native.clock import KernelClock
from dlfs.diagnosis.checks import mounting, network, targets
from dlfs.diagnosis.doctor import CHECKS, NAMES, examine
from dlfs.diagnosis.finding import Finding, Severity
from dlfs.diagnosis.machine import Machine
from tests.fault.silent_world import hang
from tests.support.memory_groups import memory_group
from tests.support.namespaces import in_own_mounts
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume
from tests.unit.diagnosis.machines import (
    GROUP,
    MOUNTS,
    STATUS,
    WELL_SET,
    Files,
    limits,
    plant,
    problems,
)

NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR
MIB, GIB = 1 << 20, 1 << 30
OTHER_ID = "6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a"
UBUNTU_RULES = """profile fusermount3 /usr/bin/fusermount3 {
  mount fstype=@{fuse_types} options=(nosuid,nodev) options in (ro,rw) -> @{HOME}/**/,
  mount fstype=@{fuse_types} options=(nosuid,nodev) options in (ro,rw) -> /mnt/{,**/},
  umount /mnt/{,**/},
  include if exists <local/fusermount3>
}"""
MEMINFO = WELL_SET["/proc/meminfo"]
NVMET = network.NVMET


def with_capability(number: int) -> str:
    return STATUS.replace("CapEff:\t0000000000000000", f"CapEff:\t{1 << number:016x}")


def as_root(capabilities: str) -> str:
    text = STATUS.replace("1000\t1000\t1000\t1000", "0\t0\t0\t0")
    return text.replace("CapEff:\t0000000000000000", f"CapEff:\t{capabilities}")


PLANTED: dict[str, tuple[Files, str, Severity, str, str]] = {
    "kernel-too-old-for-services": (
        {"/proc/sys/kernel/osrelease": "4.19.0-21-amd64"},
        *("kernel", ERROR, "/proc/sys/kernel/osrelease", "newer kernel"),
    ),
    "kernel-without-io-uring": (
        {"/proc/sys/kernel/osrelease": "5.10.0-21-amd64"},
        *("kernel", WARNING, "/proc/sys/kernel/osrelease", "newer kernel"),
    ),
    "kernel-without-keeper": (
        {"/proc/sys/kernel/osrelease": "6.1.0-21-amd64"},
        *("kernel", NOTE, "/proc/sys/kernel/osrelease", "newer kernel"),
    ),
    "io-uring-disabled": (
        {"/proc/sys/kernel/io_uring_disabled": "2"},
        *("io_uring", WARNING, "io_uring_disabled", "sysctl -w kernel.io_uring_disabled=0"),
    ),
    "io-uring-for-a-group": (
        {"/proc/sys/kernel/io_uring_disabled": "1", "/proc/sys/kernel/io_uring_group": "7"},
        *("io_uring", WARNING, "io_uring_disabled", "sysctl -w kernel.io_uring_disabled=0"),
    ),
    "slow-clock": (
        {"/sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"},
        *("clock", WARNING, "current_clocksource", "echo tsc >/sys/devices/system/clocksource"),
    ),
    "no-fuse": ({"/dev/fuse": None}, "fuse", ERROR, "/dev/fuse", "modprobe fuse"),
    "no-fusermount3": (
        {"/usr/bin/fusermount3": None},
        *("fusermount3", ERROR, "$PATH", "apt install fuse3"),
    ),
    "no-new-privileges": (
        {"/proc/self/status": STATUS.replace("NoNewPrivs:\t0", "NoNewPrivs:\t1")},
        *("fusermount3", ERROR, "/proc/self/status", "NoNewPrivileges=no"),
    ),
    "root-without-capability": (
        {"/proc/self/status": as_root("00000000a80425fb")},  # what Docker leaves to it
        *("fuse", ERROR, "/proc/self/status", "--cap-add SYS_ADMIN"),
    ),
    "no-allow-other": (
        {"/etc/fuse.conf": "#user_allow_other"},
        *("fusermount3", NOTE, "/etc/fuse.conf", "echo user_allow_other >>/etc/fuse.conf"),
    ),
    "mount-max": (
        {
            "/etc/fuse.conf": "user_allow_other\nmount_max = 1",
            "/proc/self/mountinfo": MOUNTS + "40 27 0:50 / /mnt rw - fuse.sshfs x rw",
        },
        *("fusermount3", ERROR, "/etc/fuse.conf", "mount_max = 1000"),
    ),
    "uring-offered-and-forbidden": (
        {
            "/sys/module/fuse/parameters/enable_uring": "Y",
            "/proc/sys/kernel/io_uring_disabled": "2",
        },
        *("fuse", WARNING, "enable_uring", "--no-uring"),
    ),
    "uring-without-keeper": (
        {"/sys/module/fuse/parameters/enable_uring": "Y"},
        *("fuse", NOTE, "enable_uring", "--no-uring"),
    ),
    "small-requests": (
        {"/proc/sys/fs/fuse/max_pages_limit": "32"},
        *("fuse", WARNING, "max_pages_limit", "sysctl -w fs.fuse.max_pages_limit=256"),
    ),
    "little-read-ahead": (
        {"/sys/module/fuse/parameters/max_user_bgreq": "12"},
        *("fuse", WARNING, "max_user_bgreq", "echo 64 >"),
    ),
    "requests-time-out": (
        {"/proc/sys/fs/fuse/default_request_timeout": "20"},
        *("fuse", WARNING, "default_request_timeout", "fs.fuse.default_request_timeout=0"),
    ),
    "apparmor-rules": (
        {
            "/sys/module/apparmor/parameters/enabled": "Y",
            "/sys/kernel/security/apparmor/profiles": "man (enforce)\nfusermount3 (enforce)",
            "/etc/apparmor.d/fusermount3": UBUNTU_RULES,
        },
        *("apparmor", NOTE, "/etc/apparmor.d/fusermount3", "apparmor_parser -r"),
    ),
    "apparmor-of-a-container": (
        {
            "/sys/module/apparmor/parameters/enabled": "Y",
            "/proc/self/attr/current": "docker-default (enforce)",
        },
        *("apparmor", NOTE, "/proc/self/attr/current", "apparmor=unconfined"),
    ),
    "selinux-of-a-container": (
        {
            "/sys/fs/selinux/enforce": "1",
            "/proc/self/attr/current": "system_u:system_r:container_t:s0:c1,c2",
        },
        *("selinux", WARNING, "/proc/self/attr/current", "label=disable"),
    ),
    "selinux-domain": (
        {
            "/sys/fs/selinux/enforce": "1",
            "/proc/self/attr/current": "user_u:user_r:user_t:s0",
        },
        *("selinux", NOTE, "/proc/self/attr/current", "ausearch"),
    ),
    "group-with-little-memory": (
        {f"{GROUP}/memory.max": str(256 * MIB)},
        *("memory", WARNING, f"{GROUP}/memory.max", "DLFS_MEMORY=64.0MiB"),
    ),
    "group-that-is-full": (
        {f"{GROUP}/memory.max": str(4 * GIB), f"{GROUP}/memory.current": str(4 * GIB)},
        *("memory", WARNING, f"{GROUP}/memory.max", "MemoryMax="),
    ),
    "group-that-is-slowed-down": (
        {f"{GROUP}/memory.high": str(GIB), f"{GROUP}/memory.current": str(2 * GIB)},
        *("memory", WARNING, f"{GROUP}/memory.high", "MemoryHigh="),
    ),
    "swap": (
        {"/proc/meminfo": MEMINFO.replace("SwapTotal: 0", "SwapTotal: 8388608")},
        *("swap", NOTE, "/proc/meminfo", "swapoff -a"),
    ),
    "strict-overcommitment": (
        {
            "/proc/sys/vm/overcommit_memory": "2",
            "/proc/meminfo": MEMINFO.replace("Committed_AS: 1048576", "Committed_AS: 33000000"),
        },
        *("overcommit", ERROR, "/proc/sys/vm/overcommit_memory", "vm.overcommit_memory=0"),
    ),
    "no-huge-pages": (
        {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
        *("huge pages", NOTE, "transparent_hugepage/enabled", "echo madvise >"),
    ),
    "no-huge-pages-for-this-process": (
        {"/proc/self/status": STATUS.replace("THP_enabled:\t1", "THP_enabled:\t0")},
        *("huge pages", NOTE, "/proc/self/status", "PR_SET_THP_DISABLE"),
    ),
    "no-shared-memory": (
        {"/dev/shm/x": None, "/proc/self/mountinfo": MOUNTS.replace("/dev/shm", "/dev/nothing")},
        *("shared memory", WARNING, "/proc/self/mountinfo", "mount -t tmpfs"),
    ),
    "read-only-shared-memory": (
        {"/proc/self/mountinfo": MOUNTS.replace("/dev/shm rw", "/dev/shm ro")},
        *("shared memory", WARNING, "/proc/self/mountinfo", "mount -o remount,rw /dev/shm"),
    ),
    "planted-directory": (
        {"/dev/shm/dlfs-1000": "a file"},
        *("shared memory", WARNING, "/dev/shm/dlfs-1000", "rm -r /dev/shm/dlfs-1000"),
    ),
    "few-open-files": (
        {"/proc/self/limits": limits(Max_open_files=("256", "256"))},
        *("open files", WARNING, "/proc/self/limits", "ulimit -n 1024"),
    ),
    "few-open-files-of-a-service": (
        {"/proc/self/limits": limits(Max_open_files=("1024", "1024"))},
        *("open files", WARNING, "/proc/self/limits", "LimitNOFILE=65536"),
    ),
    "little-locked-memory": (
        {"/proc/self/limits": limits(Max_locked_memory=("8388608", "8388608"))},
        *("locked memory", NOTE, "/proc/self/limits", "LimitMEMLOCK=infinity"),
    ),
    "few-processes": (
        {
            "/proc/self/limits": limits(Max_processes=("300", "300")),
            "/proc/77/status": STATUS.replace("Threads:\t3", "Threads:\t200"),
        },
        *("threads", WARNING, "/proc/self/limits", "ulimit -u"),
    ),
    "few-processes-of-a-group": (
        {f"{GROUP}/pids.max": "64"},
        *("threads", WARNING, f"{GROUP}/pids.max", "TasksMax=infinity"),
    ),
    "few-addresses": (
        {"/proc/self/limits": limits(Max_address_space=("1073741824", "1073741824"))},
        *("sizes", WARNING, "/proc/self/limits", "ulimit -v unlimited"),
    ),
    "small-files": (
        {"/proc/self/limits": limits(Max_file_size=("1048576", "1048576"))},
        *("sizes", WARNING, "/proc/self/limits", "ulimit -f unlimited"),
    ),
    "small-buffers": (
        {"/proc/sys/net/ipv4/tcp_rmem": "4096 87380 174760"},
        *("tcp", WARNING, "/proc/sys/net/ipv4/tcp_rmem", "sysctl -w net.ipv4.tcp_rmem="),
    ),
    "no-window-scaling": (
        {"/proc/sys/net/ipv4/tcp_window_scaling": "0"},
        *("tcp", WARNING, "tcp_window_scaling", "sysctl -w net.ipv4.tcp_window_scaling=1"),
    ),
    "fixed-buffers": (
        {"/proc/sys/net/ipv4/tcp_moderate_rcvbuf": "0"},
        *("tcp", WARNING, "tcp_moderate_rcvbuf", "sysctl -w net.ipv4.tcp_moderate_rcvbuf=1"),
    ),
    "no-leases-of-files": (
        {"/proc/sys/fs/leases-enable": "0"},
        *("leases", WARNING, "/proc/sys/fs/leases-enable", "sysctl -w fs.leases-enable=1"),
    ),
    "short-backlog": (
        {"/proc/sys/net/core/somaxconn": "16"},
        *("backlog", WARNING, "/proc/sys/net/core/somaxconn", "sysctl -w net.core.somaxconn"),
    ),
    "export-without-module": (
        {f"{NVMET}/ports/1/addr_trtype": "tcp"},
        *("nvmet", ERROR, "/sys/module/nvmet_tcp", "modprobe nvmet-tcp"),
    ),
    "export-to-everybody": (
        {
            f"{NVMET}/ports/1/addr_trtype": "tcp",
            f"{NVMET}/subsystems/disk/attr_allow_any_host": "1",
            "/sys/module/nvmet_tcp/refcnt": "1",
        },
        *("nvmet", WARNING, "attr_allow_any_host", "dlfs target recipe --allow"),
    ),
    "no-machine-id": (
        {"/etc/machine-id": None},
        *("identity", ERROR, "/etc/machine-id", "systemd-machine-id-setup"),
    ),
    "empty-machine-id": (
        {"/etc/machine-id": ""},
        *("identity", ERROR, "/etc/machine-id", "systemd-machine-id-setup"),
    ),
    "malformed-host-id": (
        {"/etc/nvme/hostid": "none"},
        *("identity", ERROR, "/etc/nvme/hostid", ">/etc/nvme/hostid"),
    ),
    "two-identities": (
        {
            "/etc/nvme/hostnqn": f"nqn.2014-08.org.nvmexpress:uuid:{OTHER_ID}",
            "/etc/nvme/hostid": str(UUID(int=1)),
        },
        *("identity", WARNING, "/etc/nvme/hostid", f"echo {OTHER_ID} >/etc/nvme/hostid"),
    ),
    "machine-id-of-an-image": (
        {"/.dockerenv": ""},
        *("identity", WARNING, "/etc/machine-id", ">/etc/nvme/hostnqn"),
    ),
    "container-without-identity": (
        {"/run/.containerenv": "", "/etc/machine-id": ""},
        *("identity", NOTE, "/etc/machine-id", ">/etc/nvme/hostnqn"),
    ),
    "container-that-does-not-mount": (
        {"/.dockerenv": "", "/etc/nvme/hostnqn": "nqn.2024-01.org.example:a", "/dev/fuse": None},
        *("fuse", NOTE, "/dev/fuse", "docker run --device /dev/fuse"),
    ),
}
"""Files to plant; check, severity, a part of the source and of the fix of what is to be found."""

ALONG = {"uring-offered-and-forbidden": {"io_uring"}}
"""Checks that find the same misconfiguration, too."""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"/usr/bin:{os.environ['PATH']}")


def check_complete(finding: Finding) -> None:
    assert finding.check in NAMES, finding
    assert finding.got, finding
    assert finding.source, finding
    if finding.severity:
        assert finding.expected, finding
        assert finding.why, finding
        assert finding.fix, finding


def test_nothing_is_found_where_all_is_well(tmp_path: Path) -> None:
    machine = plant(tmp_path, {})
    assert problems(machine) == []
    found = {finding.check for finding in examine(machine)}
    assert len(found) >= 18  # each check has looked


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_misconfiguration_is_found(tmp_path: Path, name: str) -> None:
    files, check, severity, source, fix = PLANTED[name]
    found = problems(plant(tmp_path, files))
    (own,) = [finding for finding in found if finding.check == check]
    assert own.severity is severity
    assert source in own.source
    assert fix in own.fix
    check_complete(own)
    assert {finding.check for finding in found} == {check, *ALONG.get(name, ())}


@pytest.mark.parametrize(
    ("clock", "severity", "fix"),
    [
        (KernelClock(synchronized=False, rate=1.0), NOTE, "chrony"),
        (KernelClock(synchronized=True, rate=1.1), ERROR, "adjtimex --tick 10000"),
    ],
)
def test_the_kernels_clock(
    tmp_path: Path, clock: KernelClock, severity: Severity, fix: str
) -> None:
    (found,) = problems(plant(tmp_path, {}, clock))
    assert (found.check, found.severity) == ("clock", severity)
    assert fix in found.fix


def test_what_allows_it_is_no_finding(tmp_path: Path) -> None:
    """Capabilities, groups and settings that make a low value right."""
    allowed: list[Files] = [
        {
            "/proc/sys/kernel/io_uring_disabled": "1",
            "/proc/sys/kernel/io_uring_group": "100",
        },
        {
            "/proc/self/status": with_capability(14),
            "/proc/self/limits": limits(Max_locked_memory=("65536", "65536")),
        },
        {
            "/proc/self/status": with_capability(24),
            "/proc/self/limits": limits(Max_processes=("10", "10")),
        },
        {
            "/proc/meminfo": MEMINFO.replace("SwapTotal: 0", "SwapTotal: 8388608"),
            f"{GROUP}/memory.max": str(32 * GIB),
            f"{GROUP}/memory.swap.max": "0",
        },
        {"/etc/nvme/hostnqn": "nqn.2024-01.org.example:trainer", "/.dockerenv": ""},
    ]
    for number, files in enumerate(allowed):
        assert problems(plant(tmp_path / str(number), files)) == []


def test_without_proc_or_sys_nothing_is_made_up(tmp_path: Path) -> None:
    no_proc: Files = {name: None for name in [*WELL_SET, "/proc/self/limits"] if "/proc/" in name}
    (found,) = problems(plant(tmp_path / "1", no_proc))
    assert (found.severity, found.source) == (ERROR, "/proc/self/status")
    assert "mount -t proc" in found.fix
    no_sys: Files = {name: None for name in WELL_SET if name.startswith("/sys/")}
    assert problems(plant(tmp_path / "2", no_sys)) == []


def test_a_file_of_an_unknown_form_is_a_note(tmp_path: Path) -> None:
    (found,) = problems(plant(tmp_path, {"/proc/sys/net/ipv4/tcp_rmem": "1 2 three"}))
    assert (found.check, found.severity) == ("tcp", NOTE)
    assert "three" in found.got


def test_numbers_are_those_of_the_code_that_uses_them() -> None:
    from dlfs.mount import mountpoint, native_server
    from dlfs.mount.supervise import keeper
    from dlfs.service import sockets

    assert mounting.READ_AHEAD_PAGES * 4 == native_server.READ_AHEAD_KIB
    assert mounting.KEEPER_SECONDS == keeper.FAILING_SECONDS_MAX
    assert mounting.FILE_SYSTEM_TYPE == mountpoint.FILE_SYSTEM_TYPE
    assert str(keeper.ENABLE_URING) == mounting.ENABLE_URING
    assert network.BACKLOG_MIN == sockets.BACKLOG
    operations = Path(__file__).parents[3] / "native/fuse/operations.c"
    assert f"#define BACKGROUND_MAX {mounting.BACKGROUND_MAX}u" in operations.read_text()
    assert len(CHECKS) == len(set(CHECKS))


# ---- this machine --------------------------------------------------------------------------------


def run_doctor(*words: object, code: int | None = None, **options: Any) -> dict[str, list[Any]]:
    """Run ``dlfs doctor --json`` in a process of its own; return its problems by check."""
    command = [sys.executable, "-m", "dlfs.cli", "doctor", "--json", *map(str, words)]
    before = options.pop("before", ())
    done = subprocess.run([*before, *command], capture_output=True, timeout=60, **options)
    assert done.returncode in (0, 1), done.stderr
    if code is not None:
        assert done.returncode == code
    document = json.loads(done.stdout)
    worst = max((Severity[each["severity"].upper()] for each in document["findings"]), default=0)
    assert done.returncode == (1 if worst >= WARNING else 0)
    assert document["worst"] == Severity(worst).label
    found: dict[str, list[Any]] = {}
    for each in document["findings"]:
        if each["severity"] != "ok":
            found.setdefault(each["check"], []).append(each)
    return found


def test_this_machine_without_a_problem_of_its_own() -> None:
    for finding in examine(Machine()):
        check_complete(finding)


def test_checks_to_leave_out() -> None:
    before = {finding.check for finding in examine(Machine())}
    after = {finding.check for finding in examine(Machine(), skip=["kernel", "identity"])}
    assert before - after == {"kernel", "identity"}
    with pytest.raises(dlfs.UsageError, match="skip"):
        list(examine(Machine(), skip=["kernels"]))


def test_limits_of_a_process() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))

    found = run_doctor(preexec_fn=lower, code=1)
    assert found["open files"][0]["got"] == "300"
    assert found["sizes"][0]["got"] == "file size 1.0 GiB"


def test_a_control_group_with_little_memory() -> None:
    with memory_group(256 * MIB) as group:
        command = [sys.executable, *group.wrapped("-m", "dlfs.cli", "doctor", "--json")]
        done = subprocess.run(command, capture_output=True, timeout=60)
    findings = json.loads(done.stdout)["findings"]
    (found,) = [each for each in findings if each["check"] == "memory"]
    assert (found["severity"], found["got"]) == ("warning", "256.0 MiB")
    assert group.directory.name in found["source"]


SHARED = {
    "read-only": ("mount -t tmpfs -o ro tmpfs /dev/shm", "read-only"),
    "small": ("mount -t tmpfs -o size=64k tmpfs /dev/shm", "64.0 KiB free"),
    "others": (
        "mount -t tmpfs tmpfs /dev/shm && mkdir -m 777 /dev/shm/dlfs-0",
        "mode 0777 of user 0",
    ),
}


@pytest.mark.root
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_that_cannot_be_used(name: str) -> None:
    command, got = SHARED[name]
    before = in_own_mounts(f'{command} && exec "$@"')
    found = run_doctor(before=before, code=1)
    assert found["shared memory"][0]["got"] == got


@pytest.mark.root
def test_an_empty_machine_id() -> None:
    command = 'mount --bind /dev/null /etc/machine-id && exec "$@"'
    found = run_doctor(before=in_own_mounts(command))
    assert found["identity"][0]["got"] == "an empty file"
    assert found["identity"][0]["severity"] == ("note" if Machine().container else "error")


# ---- targets -------------------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[int]:
    """Yield the port of a listener that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield silent.getsockname()[1]


def test_a_target_that_answers(tmp_path: Path) -> None:
    space = Namespace(24 * MIB, block_bytes=4096)
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [space])]) as target:
        dlfs.format_volume(target.uri())
        found = list(targets.check_targets(Machine(), [target.uri(), f"127.0.0.1:{target.port}"]))
    assert [finding.severity for finding in found] == [Severity.OK] * len(found)
    shown = " ".join(finding.got for finding in found)
    assert "round trip" in shown
    assert "path MTU 65535" in shown or "path MTU 65536" in shown
    assert "4096 bytes in" in shown
    assert "exports 1 namespaces" in shown
    assert "all 1 members are current" in shown


def test_a_target_that_is_not_there() -> None:
    with listening() as port:
        pass
    uri = f"nvme-tcp://127.0.0.1:{port}/{DEFAULT_NQN}?nsid=1"
    (found,) = targets.check_targets(Machine(), [uri])
    assert (found.severity, found.got) == (ERROR, "connection refused")
    assert "start the target" in found.fix


def test_a_target_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "COMMAND_MS", 300)
    with listening() as port:
        uri = f"nvme-tcp://127.0.0.1:{port}/{DEFAULT_NQN}?nsid=1"
        connected, hung = targets.check_targets(Machine(), [uri])
    assert connected.severity is Severity.OK
    assert hung.severity is ERROR
    assert "restart the target" in hung.fix


def test_a_target_that_loses_large_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "COMMAND_MS", 300)
    space = Namespace(24 * MIB, block_bytes=4096)
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [space])]) as target:
        read = targets._time_read

        def lose(device: dlfs.block.BlockDevice, length: int) -> float:
            if length > 4096:
                target.play(hang())
            return read(device, length)

        monkeypatch.setattr(targets, "_time_read", lose)
        *_, found = targets.check_targets(Machine(), [target.uri()])
    assert found.severity is ERROR
    assert "MTU" in found.why
    assert "tcp_mtu_probing" in found.fix


def test_a_service_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "CONNECT_SECONDS", 0.2)
    (found,) = targets.check_targets(Machine(), [f"unix:{tmp_path}/no.sock"])
    assert (found.check, found.severity) == ("service", ERROR)
    assert "dlfs serve" in found.fix


def test_members_of_files(tmp_path: Path) -> None:
    volume = new_volume(tmp_path / "volume.img", size_bytes=16 << 20)
    well = list(targets.check_targets(Machine(), [str(volume)]))
    assert [finding.severity for finding in well] == [Severity.OK] * 2
    (absent,) = targets.check_targets(Machine(), [str(tmp_path / "absent.img")])
    assert absent.severity is ERROR
    both = f"{tmp_path}/a.img,{tmp_path}/b.img"
    dlfs.format_volume(both.split(","), size_bytes=16 << 20, replicas=2)
    (tmp_path / "b.img").unlink()
    found = [each for each in targets.check_targets(Machine(), [both]) if each.severity]
    assert {finding.check for finding in found} == {"target", "volume"}
    assert "dlfs repair" in found[-1].fix


def test_a_directory_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume(tmp_path / "volume.img", size_bytes=16 << 20)
    with dlfs.open(volume) as opened, opened.writer("a") as writer:
        writer.add(b"a", b"a")
    monkeypatch.setattr(Machine, "free_bytes", lambda *_: 4096)
    *_, found = targets.check_targets(Machine(), [str(volume)])
    assert found.severity is WARNING
    assert "remount,size=" in found.fix


def test_a_file_system_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MEMBER_SECONDS", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(targets, "open_device", lambda _: pipe.read_bytes())  # waits for a writer
    (found,) = targets.check_targets(Machine(), [str(pipe)])
    assert (found.severity, found.got) == (ERROR, "no answer within 0.2 s")
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.fuse
def test_a_mount_whose_server_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume(tmp_path / "volume.img", size_bytes=16 << 20)
    (tmp_path / "mnt").mkdir()
    words = [str(volume), str(tmp_path / "mnt"), "--json", "--no-restart"]
    command = [sys.executable, "-m", "dlfs.cli", "mount", *words]
    pid = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["pid"]
    monkeypatch.setattr(mounting, "STAT_SECONDS", 0.3)
    try:
        os.kill(pid, signal.SIGSTOP)
        stopped = {each.source: each for each in mounting.check_mounts(Machine())}
        os.kill(pid, signal.SIGKILL)
    finally:
        os.kill(pid, signal.SIGCONT)
    found = stopped[str(tmp_path / "mnt")]
    assert (found.severity, found.got) == (ERROR, "no answer within 0.3 s")
    dead = {each.source: each for each in mounting.check_mounts(Machine())}
    subprocess.run(["fusermount3", "-u", "-z", tmp_path / "mnt"], check=True)
    assert dead[str(tmp_path / "mnt")].severity is ERROR
    assert "dlfs umount" in found.fix


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("10.0.0.11", "nvme-tcp+discover://10.0.0.11"),
        ("fe80::1", "nvme-tcp+discover://[fe80::1]"),
        ("storage-a:8009", "nvme-tcp+discover://storage-a:8009"),
        ("photos.img", "photos.img"),
        ("/data/a.img", "/data/a.img"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_addresses_are_storage_nodes(given: str, uri: str) -> None:
    assert targets.as_uri(given) == uri
