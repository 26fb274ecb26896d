"""Targets, members and volumes that the user names: whether they answer, and how fast.

A target is reached in three steps, each of which names its own failure: a TCP connection, a small
read over NVMe/TCP, and a read whose packets are as large as the path's MTU says. If small packets
pass and large ones do not, an interface or a switch on the path has a smaller MTU.

Every wait has a limit. Several members are examined at once.
"""

from __future__ import annotations

import errno
import ipaddress
import mmap
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import dlfs
from dlfs.base.deadlines import CALL_TIMEOUT_MS
from dlfs.base.threads import run_in_time
from dlfs.base.units import KIB, format_bytes
from dlfs.block import (
    BlockDevice,
    FileUri,
    NvmeTcpDevice,
    NvmeTcpDiscoverUri,
    NvmeTcpUri,
    open_device,
    parse_uri,
    split_members,
)
from dlfs.diagnosis.finding import Finding, Severity, ok, problem
from dlfs.diagnosis.machine import Machine
from dlfs.errors import AuthenticationError, DeviceTimeoutError, DlfsError, UsageError
from dlfs.fabric.discovery import Discovery, all_at_once, discover

SCHEME = "unix:"
CONNECT_SECONDS = 3.0
"""Longest wait for a connection, in seconds."""
COMMAND_MS = 3000
"""Longest wait for the answer to a command, in milliseconds."""
MEMBER_SECONDS = 12.0
"""Longest wait for one member altogether, in seconds."""
VOLUME_SECONDS = CALL_TIMEOUT_MS / 1000 + 5
"""Longest wait for a volume to be opened, in seconds; DLFS itself gives up before."""
SMALL_READS = 10
"""Small reads of which the fastest counts."""
LARGE_BYTES = 128 * KIB
"""Bytes of a read that needs packets of full size."""
SLOW_SECONDS = 0.010
"""Round trip from which on a target is called far away, in seconds."""
QUEUES_MIN = 4
"""I/O queues that a process needs to write a volume (docs/storage-nodes.md)."""

_TCP_INFO_BYTES, _PMTU, _RTT = 104, 60, 68  # struct tcp_info: its size, tcpi_pmtu, tcpi_rtt
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+(%\w+)?\]|[A-Za-z0-9.-]+):\d{1,5}")
_DIRECT_BYTES = 64 * KIB  # the largest block of a device


def check_targets(machine: Machine, targets: Sequence[str]) -> Iterator[Finding]:
    """Examine what the user named.

    Args:
        machine: the machine, for the room in its shared memory.
        targets: volumes, devices, addresses of storage nodes or sockets of services.

    Raises:
        UsageError: one of them is no URI.
    """
    for target in targets:
        if target.startswith(SCHEME):
            yield from _examine_service(target)
        else:
            yield from _examine_volume(machine, target)


def as_uri(target: str) -> str:
    """Return the URI of a storage node that is given by its address; other texts as they are."""
    try:
        shown = f"[{target}]" if ipaddress.ip_address(target).version == 6 else target
    except ValueError:
        shown = target if _ADDRESS.fullmatch(target) and not os.path.exists(target) else ""
    return f"nvme-tcp+discover://{shown}" if shown else target


def _examine_volume(machine: Machine, target: str) -> Iterator[Finding]:
    uris = [as_uri(member) for member in split_members(target)]
    parsed = [parse_uri(uri) for uri in uris]
    results = all_at_once(_examine_member, uris)
    for found in results:
        yield from found
    is_node = uris != list(split_members(target))
    failed = [any(each.severity is Severity.ERROR for each in found) for found in results]
    if not is_node and not all(failed) and parsed:
        yield from _examine_whole(machine, target)


def _examine_member(uri: str) -> list[Finding]:
    """Examine one member or storage node, and return what was found."""
    found: list[Finding] = []
    parsed = parse_uri(uri)
    name = str(parsed)
    try:
        if isinstance(parsed, NvmeTcpDiscoverUri):
            found.extend(_examine_node(parsed))
        elif isinstance(parsed, NvmeTcpUri):
            found.extend(_examine_namespace(parsed))
        elif isinstance(parsed, FileUri):
            found.append(run_in_time(partial(_examine_file, parsed), MEMBER_SECONDS))
        else:
            found.append(ok("target", "not examined: this kind is opened by DLFS only", name))
    except TimeoutError as error:
        found.append(
            _unreachable(
                str(error), name, "find out why it hangs: dmesg, the storage node, the mount"
            )
        )
    except DlfsError as error:
        found.append(_refused(error, name))
    return found


def _unreachable(got: str, source: str, fix: str) -> Finding:
    return problem(
        "target",
        Severity.ERROR,
        got=got,
        source=source,
        expected="an answer",
        why="volumes on it cannot be read, or from other copies only",
        fix=fix,
    )


def _refused(error: DlfsError, name: str) -> Finding:
    """Return the finding of a device that cannot be opened or read."""
    text = str(error)
    if isinstance(error, AuthenticationError):
        fix = "compare the keys of host and target: docs/storage-nodes.md#authentication"
    elif isinstance(error, DeviceTimeoutError):
        fix = "restart the target: it accepts connections and does not answer commands"
    elif isinstance(error, UsageError):
        fix = "follow the message"
    elif getattr(error, "errno", None) == errno.EACCES or "refuse" in text:
        fix = "allow this host on the target: 'dlfs target hostnqn' prints its name"
    else:
        fix = "check the path or URI; 'dlfs discover HOST' lists what a storage node exports"
    return _unreachable(text, name, fix)


# ---- files and disks -----------------------------------------------------------------------------


def _examine_file(uri: FileUri) -> Finding:
    """Open a file or disk as a reader does, and read its first block."""
    began = time.monotonic()
    with open_device(str(uri)) as device:
        device.read(0, device.block_bytes)
        spent_ms = (time.monotonic() - began) * 1e3
        got = (
            f"read by {_ENGINES.get(device.native.kind, device.native.kind)} in blocks of "
            f"{format_bytes(device.block_bytes)}; opened in {spent_ms:.1f} ms"
        )
    if has_direct(uri.path):
        return ok("target", f"{got}, past the page cache", uri.path)
    return problem(
        "target",
        Severity.WARNING,
        got=f"{got}, without O_DIRECT",
        source=uri.path,
        expected="a file system with O_DIRECT",
        why="each sample is in the page cache, too, which takes memory and time",
        fix="move the volume to a local file system such as ext4 or XFS, or to a disk",
    )


_ENGINES = {"uring": "io_uring", "threads": "threads"}


def has_direct(path: str) -> bool:
    """Return True if a direct read of a file works."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, _DIRECT_BYTES) as memory:
            os.preadv(descriptor, [memory], 0)
    except OSError as error:
        return error.errno != errno.EINVAL
    finally:
        os.close(descriptor)
    return True


# ---- storage nodes -------------------------------------------------------------------------------


def _examine_node(uri: NvmeTcpDiscoverUri) -> Iterator[Finding]:
    """Connect to a storage node, list what it exports, and connect to each of its addresses."""
    found = _connect(uri.host, uri.port)
    yield found
    if found.severity is Severity.ERROR:
        return
    options = replace(uri.options, timeout_ms=COMMAND_MS, connect_ms=COMMAND_MS, reconnect_ms=0)
    listed = run_in_time(lambda: discover(replace(uri, options=options)), 2 * MEMBER_SECONDS)
    yield from _describe_node(listed, str(uri))
    addresses = {(path.host, path.port) for each in listed.subsystems for path in each.paths}
    others = sorted(addresses - {(uri.host, uri.port)})
    yield from all_at_once(lambda address: _connect(*address), others)


def _describe_node(listed: Discovery, name: str) -> Iterator[Finding]:
    count = 0
    for subsystem in listed.subsystems:
        count += len(subsystem.namespaces)
        if subsystem.problem is not None:
            yield problem(
                "target",
                Severity.WARNING,
                got=f"{subsystem.nqn}: {subsystem.problem}",
                source=name,
                expected="a subsystem that this host can use",
                why="volumes on it are not found",
                fix="follow the message, or leave the subsystem to other hosts",
            )
    if count:
        yield ok("target", f"exports {count} namespaces to this host", name)
        return
    yield problem(
        "target",
        Severity.WARNING,
        got="no namespace for this host",
        source=name,
        expected="one or more",
        why="no volume is found there",
        fix="allow this host on the target ('dlfs target hostnqn'), or give hostnqn= in the URI",
    )


def measure_path(host: str, port: int) -> tuple[float, int]:
    """Connect by TCP; return the round trip, in seconds, and the MTU of the path.

    Raises:
        OSError: there is no connection.
        TimeoutError: nothing answers in time.
    """

    def connect() -> tuple[float, int]:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (mtu,) = struct.unpack_from("I", info, _PMTU)
            (round_trip_us,) = struct.unpack_from("I", info, _RTT)
            return round_trip_us / 1e6, mtu

    return run_in_time(connect, 2 * CONNECT_SECONDS)


def _connect(host: str, port: int) -> Finding:
    """Connect to an address, and tell the round trip and the path's MTU."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        round_trip_s, mtu = measure_path(host, port)
    except (OSError, TimeoutError) as error:
        return _unconnected(error, where)
    got = f"round trip {round_trip_s * 1e3:.2f} ms, path MTU {mtu}"
    if round_trip_s < SLOW_SECONDS:
        return ok("target", got, where)
    return problem(
        "target",
        Severity.NOTE,
        got=got,
        source=where,
        expected=f"less than {SLOW_SECONDS * 1e3:.0f} ms",
        why="128 requests in flight give at most "
        f"{128 / round_trip_s:,.0f} a second to each thread",
        fix="a storage node that is nearer, or a larger depth= of dlfs.open",
    )


def _unconnected(error: Exception, where: str) -> Finding:
    number = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror):
        got, fix = f"{error.strerror}", "the name in /etc/hosts or DNS, or an address in its place"
    elif number == errno.ECONNREFUSED:
        got = "connection refused"
        fix = "start the target on the storage node (sh EXPORT.sh start), or correct the port"
    elif isinstance(error, TimeoutError):
        got = f"no answer within {CONNECT_SECONDS:g} s"
        fix = "open the port in firewalls on the way, and check the route: ip route get ADDRESS"
    else:
        got = getattr(error, "strerror", None) or str(error)
        fix = "check interface and route: ip route get ADDRESS"
    return _unreachable(got, where, fix)


def _examine_namespace(uri: NvmeTcpUri) -> Iterator[Finding]:
    """Connect to a namespace's addresses, and read small and large pieces of it."""
    found = all_at_once(lambda address: _connect(*address), list(uri.paths))
    yield from found
    if all(each.severity is Severity.ERROR for each in found):
        return
    options = replace(uri.options, timeout_ms=COMMAND_MS, connect_ms=COMMAND_MS, reconnect_ms=0)
    short = replace(uri, options=options)
    yield from run_in_time(lambda: _read_namespace(short, str(uri)), MEMBER_SECONDS)


def _read_namespace(uri: NvmeTcpUri, name: str) -> list[Finding]:
    with NvmeTcpDevice(uri) as device:
        fastest_s = min(_time_read(device, device.block_bytes) for _ in range(SMALL_READS))
        got = f"{device.block_bytes} bytes in {fastest_s * 1e6:.0f} us"
        found = _check_queues(device, name)
        large = min(LARGE_BYTES, device.size_bytes)
        large -= large % device.block_bytes
        try:
            spent_s = _time_read(device, large)
        except DlfsError as error:
            return [*found, _lost_packets(str(error), got, name)]
        shown = f"{got}, {format_bytes(large)} in {spent_s * 1e6:.0f} us"
        return [*found, ok("target", shown, name)]


def _time_read(device: BlockDevice, length_bytes: int) -> float:
    began = time.monotonic()
    device.read(0, length_bytes)
    return time.monotonic() - began


def _lost_packets(error: str, small: str, name: str) -> Finding:
    return problem(
        "target",
        Severity.ERROR,
        got=f"{small}, but {error}",
        source=name,
        expected=f"{format_bytes(LARGE_BYTES)} in one read",
        why="small packets pass and large ones do not: a part of the path has a smaller MTU",
        fix="ip link set dev INTERFACE mtu 1500 at both ends, or sysctl -w "
        "net.ipv4.tcp_mtu_probing=1 on the storage node",
    )


def _check_queues(device: NvmeTcpDevice, name: str) -> list[Finding]:
    count = device.queue_pairs_max
    if count == 0 or count >= QUEUES_MIN:
        return []
    return [
        problem(
            "target",
            Severity.WARNING,
            got=f"{count} I/O queues for this host",
            source=name,
            expected=f"{QUEUES_MIN} or more",
            why="a writer needs four queues, and each thread that reads at once one more",
            fix="nvmet: attr_qid_max of the subsystem; SPDK: nvmf_create_transport -m",
        )
    ]


# ---- volumes and services ------------------------------------------------------------------------


def _examine_whole(machine: Machine, uri: str) -> Iterator[Finding]:
    """Open a volume; name the members that it lacks, and directories that do not fit."""
    try:
        info, largest = run_in_time(partial(_open_volume, uri), VOLUME_SECONDS)
    except (DlfsError, OSError, TimeoutError) as error:
        yield problem(
            "volume",
            Severity.ERROR,
            got=str(error),
            source=uri,
            expected="a volume that can be opened",
            why="its datasets cannot be read",
            fix="docs/troubleshooting.md, by the text of the error",
        )
        return
    absent = [member for member in info.members if member.state != "current"]
    for member in absent:
        yield problem(
            "volume",
            Severity.ERROR,
            got=f"member {member.number} is {member.state}: {member.reason}",
            source=member.uri,
            expected="a current member",
            why="nothing can be written, and samples without another copy cannot be read",
            fix="bring it back, then dlfs repair VOLUME",
        )
    if not absent:
        yield ok("volume", f"{info.uuid}: all {len(info.members)} members are current", uri)
    try:
        free = machine.free_bytes("/dev/shm")
    except (OSError, TimeoutError):
        return  # the check of shared memory has a finding of it
    if largest > free:
        yield problem(
            "volume",
            Severity.WARNING,
            got=f"a directory of {format_bytes(largest)}, {format_bytes(free)} are free",
            source="/dev/shm",
            expected="room for the directory",
            why="each process has its own copy of it",
            fix=f"mount -o remount,size={2 * largest >> 20}m /dev/shm, or docker run --shm-size",
        )


def _open_volume(uri: str) -> tuple[dlfs.VolumeInfo, int]:
    """Return what a volume consists of, and the bytes of its largest directory."""
    with dlfs.open(uri) as volume:
        sizes = [version.directory_bytes for version in volume.usage().versions]
        return volume.info(), max(sizes, default=0)


def _examine_service(uri: str) -> Iterator[Finding]:
    """Connect to a node service."""
    try:
        info = run_in_time(partial(_ask_service, uri), 2 * CONNECT_SECONDS)
    except (DlfsError, OSError, TimeoutError) as error:
        yield problem(
            "service",
            Severity.ERROR,
            got=str(error),
            source=uri,
            expected="an answer",
            why="programs that use this service fail",
            fix=f"dlfs serve VOLUME --socket {uri.removeprefix(SCHEME)}, or follow the message",
        )
        return
    yield ok("service", info, uri)


def _ask_service(uri: str) -> str:
    from dlfs.service.client import get_statistics

    found = get_statistics(uri, timeout_s=CONNECT_SECONDS)
    return f"answers; {len(found.get('datasets', []))} datasets are open"
