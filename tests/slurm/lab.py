"""A real Slurm cluster on one machine: ``SlurmLab``, for tests and benchmarks.

Actors. The **head** runs slurmctld and munged, each **node** a slurmd. Every one of them is a tree
of processes with namespaces of its own: network, host name, processes, mounts and System V
memory. It has an own /dev/shm, /run and /etc (host name, machine-id, users), and shares processors,
disks and all other files with this machine. The head's network has the switch; addresses are
10.77.0.1 (head) and 10.77.0.11, 10.77.0.12, ... (nodes ``n1``, ``n2``, ...). A storage target for
the nodes is started on the head (``lab.head.start``) and listens on its address.

Since no name lies outside of these namespaces, any number of labs may run at once. A lab leaves
nothing: the first process of each machine ends when its standard input is closed, also by the death
of this process, and the kernel then kills all processes of the machine and undoes its mounts and
links.

    with SlurmLab(nodes=2) as lab:
        lab.head.run("srun", "-N2", "hostname")      # output; raises if it fails
        job = lab.submit(script, "--requeue", user="ann")
        lab.wait_for_state(job, "COMPLETED")
        lab.nodes["n2"].crash()                       # power cut: all processes, /dev/shm, mounts
        lab.nodes["n2"].boot()
        lab.nodes["n1"].kill_slurmd()                 # slurmd alone; jobs go on
        lab.nodes["n1"].start_slurmd()

``lab.shared`` is a directory that every user may write to, ``node.scratch`` one of a node that
lives as long as the lab. ``settings=`` is appended to slurm.conf, such as ``Prolog=...``.

Limits: Slurm sees a quick reboot by the uptime, which all machines of a lab share: let a crashed
node stay away until ``lab.state_of`` is down, or srun waits for its tasks without end. Slurm
22.05 of Debian 12 was tried; a node takes 20 MB of memory. The nodes show what is
correct, not what is fast. Threads: one at a time, except ``run`` and ``start``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from uuid import uuid4

from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "nsenter", "unshare", "ip")
USERS = {"ann": 41001, "bob": 41002}
"""Users of every machine of a lab beside those of this machine, and their IDs."""
NODE_CPUS = 4
"""Processors that a node claims; they are shared with this machine."""

_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=head(10.77.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/%n
SlurmdDebug=verbose
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,requeue_delay=1
ReturnToService=2
SlurmdTimeout=5
KillWait=3
MessageTimeout=10
JobRequeue=1
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
PartitionName=all Nodes=ALL Default=YES MaxTime=60 OverTimeLimit=0 OverSubscribe=NO State=UP
"""

_BOOT = r"""
set -e
exec 2>&1
mount -t proc proc /proc
# What others have mounted on this machine is not on this one.
awk '/ - fuse/ {{ print $5 }}' /proc/self/mountinfo | while read -r at; do
    umount -l "$(printf %b "$at")"
done
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock
mount --bind {etc} /etc
mount --bind {fuse} /dev/fuse
{open}
hostname {name}
ip link set lo up
{program}
echo booted
exec 0<&3
read -r _ || true
"""


def lacks_slurm() -> str | None:
    """Return what this machine lacks for a lab, or None."""
    missing = [name for name in PROGRAMS if _which(name) is None]
    if missing:
        return f"no {', '.join(missing)} (packages slurmctld slurmd slurm-client munge iproute2)"
    return None if os.geteuid() == 0 else "not root"


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _open_to_users(paths: Sequence[Path]) -> str:
    """Return commands after which every user can reach directories, also in closed ones.

    Python may be in root's home directory.
    """
    closed: dict[Path, list[Path]] = {}
    for path in sorted({path.resolve() for path in paths}):
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(parent, []).append(path)
                break
    return "\n".join(_cover(parent, inside, 0o755) for parent, inside in closed.items())


def _cover(parent: Path, paths: Sequence[Path], mode: int) -> str:
    """Return commands that cover a directory by an empty one, in which some of it is still there.

    Args:
        parent: the directory.
        paths: directories that are still there, if they are in ``parent``.
        mode: permissions of the empty one.
    """
    inside: list[Path] = []
    for path in sorted({path.resolve() for path in paths}):
        if path.is_relative_to(parent) and not any(path.is_relative_to(each) for each in inside):
            inside.append(path)
    lines = []
    for number, path in enumerate(inside):
        lines.append(f"mkdir /run/stash{number}")
        lines.append(f"mount --bind {shlex.quote(str(path))} /run/stash{number}")
    lines.append(f"mount -t tmpfs -o mode={mode:o} tmpfs {shlex.quote(str(parent))}")
    for number, path in enumerate(inside):
        quoted = shlex.quote(str(path))
        lines.append(f"mkdir -p {quoted}; mount --move /run/stash{number} {quoted}")
        lines.append(f"rmdir /run/stash{number}")
    return "\n".join(lines)


class Machine:
    """The head or a node of a lab.

    Args:
        lab: the lab.
        name: host name.
        address: IPv4 address in 10.77.0.0/24.

    Attributes:
        name, address: as given.
        etc: its /etc.
        scratch: directory of this machine that lives as long as the lab, writable for every user.
    """

    def __init__(self, lab: SlurmLab, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._lab = lab
        self._init: subprocess.Popen[str] | None = None
        self._pid = 0
        self.etc = lab.folder / f"etc-{name}"
        shutil.copytree("/etc", self.etc, symlinks=True)
        shutil.rmtree(self.etc / "nvme", ignore_errors=True)
        (self.etc / "machine-id").write_text(f"{uuid4().hex}\n")
        (self.etc / "hosts").write_text(lab.hosts)
        with (self.etc / "passwd").open("a") as passwd, (self.etc / "group").open("a") as group:
            for user, number in lab.users.items():
                home = lab.shared / "home" / str(number)
                passwd.write(f"{user}:x:{number}:{number}::{home}:/bin/bash\n")
                group.write(f"{user}:x:{number}:\n")
        self.scratch = lab.folder / f"scratch-{name}"
        self.scratch.mkdir()
        self.scratch.chmod(0o1777)

    @property
    def is_up(self) -> bool:
        """True between ``boot`` and ``crash``."""
        return self._init is not None

    @property
    def log(self) -> str:
        """The log of slurmd, or of slurmctld."""
        name = "slurmctld" if self.name == "head" else self.name
        path = self._lab.folder / "log" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def boot(self) -> None:
        """Start the machine and its daemons."""
        assert self._init is None, f"{self.name} is up"
        fuse = self._lab.folder / "fuse"
        needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
        covers = [_open_to_users(needed)]
        if self._lab.private_tmp:
            covers.append(_cover(Path("/tmp"), [self._lab.folder, *needed], 0o1777))
        boot = _BOOT.format(
            etc=self.etc,
            open="\n".join(covers),
            fuse=fuse,
            name=self.name,
            program=self._network_inside(),
        )
        kinds = ("--net", "--uts", "--pid", "--mount", "--ipc")
        init = subprocess.Popen(
            ["unshare", *kinds, "--propagation", "private", "--fork", "--",
             "bash", "-c", "exec 3<&0 </dev/null; " + boot],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._init = init
        assert init.stdout is not None
        shown = ""
        while not shown.endswith("booted\n"):
            line = init.stdout.readline()
            assert line, f"{self.name} did not boot: {shown}"
            shown += line
        children = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
        self._pid = int(children[0])
        self._connect()
        self._start_daemons()

    def _network_inside(self) -> str:
        return ""

    def _connect(self) -> None:
        """Connect the machine to the switch."""
        number = self.address.rpartition(".")[2]
        head = self._lab.head
        # The kernel may not have taken back the link of a machine that has just crashed.
        head.try_run("ip", "link", "del", f"to{number}", outside=True)
        head.run("ip", "link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0",
                 "netns", f"/proc/{self._pid}/ns/net", outside=True)  # fmt: skip
        head.run("ip", "link", "set", f"to{number}", "master", "switch", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def _start_daemons(self) -> None:
        self.start_slurmd()

    def crash(self) -> None:
        """End the machine as a power cut does: kill all processes; undo its mounts and memory."""
        if self._init is None:
            return
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, 9)
        self._init.communicate()  # closes the input, which alone would end it as well
        self._init, self._pid = None, 0

    def command(
        self,
        *words: str,
        user: str | None = None,
        cwd: str | Path | None = None,
        outside: bool = False,
    ) -> list[str]:
        """Return the command that runs another one on this machine.

        Args:
            words: program and arguments.
            user: user that runs it; root by default.
            cwd: working directory; the lab's shared directory by default.
            outside: run it in the machine's network only, with the files and processes of this
                machine.
        """
        assert self._pid, f"{self.name} is down"
        kinds = ["--net"] if outside else ["--net", "--uts", "--pid", "--mount", "--ipc"]
        enter = ["nsenter", "--target", str(self._pid), *kinds, "--"]
        words = ("env", "--chdir", str(cwd or self._lab.shared), *words)
        if user is None:
            return [*enter, *words]
        number = str(self._lab.users[user])
        become = ["setpriv", "--reuid", number, "--regid", number, "--clear-groups", "--"]
        return [*enter, *become, *words]

    def environment(self, user: str | None = None) -> dict[str, str]:
        """Return the environment of programs that ``run`` and ``start`` start for a user."""
        kept = {
            name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "XDG_", "DLFS_", "PYTEST_")) and name != "TMPDIR"
        }  # fmt: skip
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        home = "/root" if user is None else str(self._lab.home(user))
        return {
            **kept,
            "PATH": path,
            "HOME": home,
            "USER": user or "root",
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self._lab.configuration),
        }

    def start(
        self,
        *words: str,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        outside: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a program on this machine, with pipes for its input and its (one) output.

        It ends when the machine does. ``subprocess`` closes the pipes: use it in a ``with``.
        """
        return subprocess.Popen(
            self.command(*words, user=user, cwd=cwd, outside=outside),
            env={**self.environment(user), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def try_run(
        self,
        *words: str,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        outside: bool = False,
        timeout_s: float = 120,
    ) -> tuple[int, str]:
        """Run a program on this machine; return its exit status and its output."""
        with self.start(
            *words, user=user, environment=environment, cwd=cwd, outside=outside
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return process.returncode, output

    def run(
        self,
        *words: str,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        outside: bool = False,
        timeout_s: float = 120,
    ) -> str:
        """Run a program on this machine; return its output.

        Raises:
            AssertionError: its exit status is not 0.
        """
        code, output = self.try_run(
            *words, user=user, environment=environment, cwd=cwd, outside=outside,
            timeout_s=timeout_s,
        )  # fmt: skip
        assert code == 0, f"{self.name}: {shlex.join(words)}: exit status {code}: {output}"
        return output

    def processes(self, *patterns: str) -> dict[int, str]:
        """Return the processes of this machine: IDs as this machine's tests see them, and commands.

        Args:
            patterns: only those whose command line has one of these texts.
        """
        found = {}
        space = os.readlink(f"/proc/{self._pid}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/pid") != space:
                    continue
                command = os.fsdecode((folder / "cmdline").read_bytes().replace(b"\0", b" "))
                if command and (not patterns or any(each in command for each in patterns)):
                    found[int(folder.name)] = command.strip()
        return found

    def start_slurmd(self) -> None:
        """Start slurmd on the node."""
        self.run("slurmd", "-N", self.name)

    def kill_slurmd(self, *, with_steps: bool = False) -> None:
        """Kill slurmd by SIGKILL, and its slurmstepd as well if asked; the jobs' processes stay."""
        for pid, command in self.processes("slurmd", "slurmstepd").items():
            if command.startswith("slurmstepd") and not with_steps:
                continue
            if command.split()[0].rpartition("/")[2].rstrip(":") in ("slurmd", "slurmstepd"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)


class _Head(Machine):
    """The machine of slurmctld, munged and the switch."""

    def _network_inside(self) -> str:
        return (
            "ip link add switch type bridge\n"
            f"ip address add {self.address}/24 dev switch\n"
            "ip link set switch up\n"
        )

    def _connect(self) -> None:
        pass

    def _start_daemons(self) -> None:
        munge = self._lab.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self.run("munged", *options, f"--seed-file={munge / 'seed'}")
        self.run("slurmctld")


class SlurmLab:
    """A cluster of a head and some nodes, all idle when the constructor returns.

    Args:
        nodes: number of nodes.
        settings: lines to append to slurm.conf; ``{folder}`` and ``{shared}`` stand for the lab's
            directories.
        users: names and IDs of the users, in addition to those of this machine.
        node_options: further words of the lines of nodes, such as ``Gres=disk:1G``.

    Attributes:
        folder: directory of the lab, open to every user; removed at the end.
        shared: directory in it that every user may write to, the same on all machines.
        configuration: slurm.conf. After a change: ``lab.head.run("scontrol", "reconfigure")``.
        head: the machine of slurmctld and of storage targets.
        nodes: the nodes by name, ``n1`` to ``nN``.
    """

    private_tmp = False
    """True to give each machine a /tmp of its own, in which only the lab's directory is common."""

    def __init__(
        self,
        nodes: int = 2,
        settings: str = "",
        users: Mapping[str, int] | None = None,
        node_options: str = "",
    ) -> None:
        self.users = dict(USERS if users is None else users)
        self.folder = Path(tempfile.mkdtemp(prefix="dlfs-slurm-"))
        self.nodes: dict[str, Machine] = {}
        try:
            names = [f"n{number}" for number in range(1, nodes + 1)]
            addresses = {name: f"10.77.0.{10 + n}" for n, name in enumerate(names, 1)}
            self._make_files(addresses, settings, node_options)
            self.prepare()
            self.head: Machine = _Head(self, "head", "10.77.0.1")
            self.head.boot()
            for name, address in addresses.items():
                self.nodes[name] = Machine(self, name, address)
                self.nodes[name].boot()
            wait_for(lambda: self.idle() == nodes, "all nodes to be idle")
        except BaseException as error:
            with contextlib.suppress(OSError):
                for log in sorted((self.folder / "log").iterdir()):
                    error.add_note(f"{log.name}: {log.read_text(errors='replace')[-3000:]}")
            self.close()
            raise

    def _make_files(self, addresses: Mapping[str, str], settings: str, node_options: str) -> None:
        self.folder.chmod(0o755)
        self.shared = self.folder / "shared"
        for name in ("log", "state", "munge"):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o755)
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        for number in self.users.values():
            home = self.shared / "home" / str(number)
            home.mkdir(parents=True)
            os.chown(home, number, number)
        key = self.folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        os.mknod(self.folder / "fuse", 0o20666, os.makedev(10, 229))
        (self.folder / "fuse").chmod(0o666)  # as udev makes it
        hosts = {"head": "10.77.0.1", **addresses}
        self.hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in hosts.items()
        )
        self.configuration = self.folder / "slurm.conf"
        lines = [_CONFIGURATION.format(folder=self.folder)]
        lines += [
            f"NodeName={name} NodeAddr={address} CPUs={NODE_CPUS} RealMemory=2000 {node_options}\n"
            for name, address in addresses.items()
        ]
        lines += [settings.format(folder=self.folder, shared=self.shared), "\n"]
        self.configuration.write_text("".join(lines))
        # slurmd wants this file even where nothing is limited.
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n"
        )

    def prepare(self) -> None:
        """Make further files of the lab, before the first machine boots. Nothing by default."""

    def home(self, user: str) -> Path:
        """Return the home directory of a user, the same on all machines."""
        return self.shared / "home" / str(self.users[user])

    def idle(self) -> int:
        """Return the number of idle nodes."""
        code, shown = self.head.try_run("sinfo", "-h", "-t", "idle", "-o", "%D")
        return int(shown) if code == 0 and shown.strip().isdecimal() else 0

    def state_of(self, node: Machine) -> str:
        """Return the state of a node, as sinfo calls it, such as ``idle`` or ``down*``.

        All nodes are asked for: slurmctld counts allocated processors then. A single node that
        went down while it had some stays ``mixed*`` for ``sinfo --nodes``.
        """
        shown = self.head.run("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in shown.splitlines())[node.name]

    def submit(
        self,
        script: str,
        *options: str,
        user: str | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Submit a batch script; return the job's ID.

        Args:
            script: text of the script, or path of its file.
            options: options of sbatch.
            user: user whose job it is; root by default.
            arguments: arguments of the script.
            environment: variables of the job, in addition.
        """
        is_text = script.startswith("#!")
        words = ["sbatch", "--parsable", *options]
        if is_text:
            path = self.folder / f"{uuid4().hex}.sbatch"
            path.write_text(script)
            path.chmod(0o755)
            script = str(path)
        shown = self.head.run(*words, script, *arguments, user=user, environment=environment)
        return int(shown.splitlines()[-1].partition(";")[0])

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process of a machine, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def job(self, job: int) -> dict[str, str]:
        """Return what ``scontrol show job`` knows of a job, which may be one of an array."""
        shown = self.head.run("scontrol", "-o", "-d", "show", "job", str(job)).splitlines()
        (found,) = [line for line in shown if line.startswith(f"JobId={job} ")]
        return dict(word.partition("=")[::2] for word in found.split())

    def wait_for_state(self, job: int, *states: str) -> dict[str, str]:
        """Wait until a job has one of these states, such as RUNNING; return what Slurm knows of it.

        Raises:
            AssertionError: it ended in another state.
        """
        ended = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "BOOT_FAIL"}
        found: dict[str, str] = {}

        def has_state() -> bool:
            found.clear()
            found.update(self.job(job))
            state = found["JobState"]
            assert state in states or state not in ended, f"job {job} is {state}: {found}"
            return state in states

        wait_for(has_state, f"job {job} to be {' or '.join(states)}")
        return found

    def wait_for_files(self, *names: str) -> None:
        """Wait until these files of ``shared`` exist and have contents."""
        paths = [self.shared / name for name in names]
        wait_for(
            lambda: all(path.exists() and path.stat().st_size for path in paths),
            f"{', '.join(names)} in {self.shared}",
        )

    def close(self) -> None:
        """End all machines and remove the lab's directory."""
        for machine in (*self.nodes.values(), getattr(self, "head", None)):
            if machine is not None:
                machine.crash()
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
