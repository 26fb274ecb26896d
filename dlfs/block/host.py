"""The host NQN and host ID by which an NVMe-oF target knows this host.

Both are those of the kernel's initiator if /etc/nvme has them; if it has one of them, the other is
that in its UUID form. Otherwise both are derived by a hash from the machine's ID, which
machine-id(5) asks not to publish. A machine without an ID, as many containers are, has no identity:
one that each process made up would match no target's access list, and no reservation of a process
before it. The error says what to write where.

libdlfs follows the same rules (``native/src/device/host.c``), since programs in C connect without
Python; and this module does not call it, since its errors show what a file contains, and it warns.

Source: NVM Express Base Specification 2.0, section 4.5 (the UUID form of NQNs); machine-id(5).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from dlfs.errors import UsageError


@dataclass(frozen=True)
class HostFiles:
    """The files of a host's identity.

    Attributes:
        nqn: the NQN of the kernel's initiator.
        host_id: its host ID.
        machine: the machine's ID.
    """

    nqn: Path = Path("/etc/nvme/hostnqn")
    host_id: Path = Path("/etc/nvme/hostid")
    machine: Path = Path("/etc/machine-id")


_FILES = HostFiles()
_NQN_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"
_NQN = re.compile(r"nqn\.\d{4}-\d{2}\.[\x21-\x7e]{1,211}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_SHOWN_CHARACTERS = 60

_log = logging.getLogger("dlfs.block")


def host_nqn() -> str:
    """Return the NQN of this host, at most 223 bytes.

    Raises:
        UsageError: the machine has no identity, or a file of it is malformed.
    """
    return host_identity(None, None)[0]


def host_identity(nqn: str | None, host_id: UUID | None) -> tuple[str, UUID]:
    """Return the NQN and the ID by which this host connects.

    A warning names a host ID that contradicts the UUID in the NQN: targets, and the reservations on
    them, may take the two for different hosts.

    Args:
        nqn: NQN that the caller gave; None for that of this host.
        host_id: ID that the caller gave; None for the one that belongs to the NQN.

    Raises:
        UsageError: the machine has no identity, or a file of it is malformed.
    """
    found = find_identity(nqn, host_id, files=_FILES)
    if find_contradiction(*found):
        _warn(*found)
    return found


def find_identity(
    nqn: str | None = None, host_id: UUID | None = None, *, files: HostFiles
) -> tuple[str, UUID]:
    """Return the NQN and the ID of a host, as ``host_identity``, without a warning.

    Args:
        nqn: NQN that the caller gave; None for that of the host.
        host_id: ID that the caller gave; None for the one that belongs to the NQN.
        files: the files of the host's identity.

    Raises:
        UsageError: the machine has no identity, or a file of it is malformed.
    """
    is_own = nqn in (None, _read_line(files.nqn))
    if nqn is None:
        nqn = _stated_nqn(files) or f"{_NQN_PREFIX}{_stated_id(files) or _derived_id(files)}"
    if host_id is None:
        named = _uuid_in(nqn)
        first, second = (_stated_id(files), named) if is_own else (named, _stated_id(files))
        host_id = first or second or _derived_id(files)
    return nqn, host_id


def find_contradiction(nqn: str, host_id: UUID) -> bool:
    """Return True if an NQN has a UUID, and it is not the host ID."""
    return _uuid_in(nqn) not in (None, host_id)


@functools.cache
def _warn(nqn: str, host_id: UUID) -> None:
    """Log, once, that an ID contradicts an NQN."""
    _log.warning(
        "the host ID %s contradicts the UUID in the host NQN %s: targets may take them for two "
        "hosts; make them equal, in %s and %s or in hostid= and hostnqn= of the URI",
        host_id,
        nqn,
        _FILES.host_id,
        _FILES.nqn,
    )


def _read_line(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").partition("\n")[0].strip()
    except OSError:
        return ""


def _stated_nqn(files: HostFiles) -> str | None:
    """Return the NQN of the kernel's initiator; None if there is none."""
    line = _read_line(files.nqn)
    if line and not _NQN.fullmatch(line):
        raise _malformed(files.nqn, "an NQN (nqn.yyyy-mm...) of at most 223 bytes", line)
    return line or None


def _stated_id(files: HostFiles) -> UUID | None:
    """Return the host ID of the kernel's initiator; None if there is none."""
    line = _read_line(files.host_id)
    if line and not _UUID.fullmatch(line):
        raise _malformed(files.host_id, "a UUID", line)
    return UUID(line) if line else None


def _malformed(path: Path, expected: str, got: str) -> UsageError:
    return UsageError(
        f"find this host's NQN and ID: read {path}: expected {expected}, "
        f"got {got[:_SHOWN_CHARACTERS]!a}"
    )


def _uuid_in(nqn: str) -> UUID | None:
    """Return the UUID of an NQN in its UUID form; None if it has another form."""
    text = nqn.removeprefix(_NQN_PREFIX)
    return UUID(text) if text != nqn and _UUID.fullmatch(text) else None


def _derived_id(files: HostFiles) -> UUID:
    """Return the UUID that is derived from the machine's ID."""
    machine = _read_line(files.machine)
    if not re.fullmatch(r"[0-9a-f]{32}", machine):
        got = ascii(machine[:_SHOWN_CHARACTERS]) if machine else "nothing"
        raise UsageError(
            f"find this host's NQN and ID: expected them in {files.nqn} and {files.host_id}, or "
            f"the ID of the machine in {files.machine}, got {got} in the last; write the NQN that "
            f"the targets allow to {files.nqn}, such as {_NQN_PREFIX}{uuid4()}, and its UUID "
            f"to {files.host_id}; or give hostnqn= and hostid= in the URI"
        )
    digest = hashlib.blake2s(bytes.fromhex(machine), digest_size=16, person=b"dlfshost").digest()
    return UUID(bytes=digest, version=4)
