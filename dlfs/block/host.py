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
from pathlib import Path
from uuid import UUID, uuid4

from dlfs.errors import UsageError

_NQN_FILE = Path("/etc/nvme/hostnqn")
_ID_FILE = Path("/etc/nvme/hostid")
_MACHINE_FILE = Path("/etc/machine-id")
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
    is_own = nqn in (None, _read_line(_NQN_FILE))
    if nqn is None:
        nqn = _stated_nqn() or f"{_NQN_PREFIX}{_stated_id() or _derived_id()}"
    named = _uuid_in(nqn)
    if host_id is None:
        first, second = (_stated_id(), named) if is_own else (named, _stated_id())
        host_id = first or second or _derived_id()
    if named not in (None, host_id):
        _warn(nqn, host_id)
    return nqn, host_id


@functools.cache
def _warn(nqn: str, host_id: UUID) -> None:
    """Log, once, that an ID contradicts an NQN."""
    _log.warning(
        "the host ID %s contradicts the UUID in the host NQN %s: targets may take them for two "
        "hosts; make them equal, in %s and %s or in hostid= and hostnqn= of the URI",
        host_id,
        nqn,
        _ID_FILE,
        _NQN_FILE,
    )


def _read_line(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").partition("\n")[0].strip()
    except OSError:
        return ""


def _stated_nqn() -> str | None:
    """Return the NQN of the kernel's initiator; None if there is none."""
    line = _read_line(_NQN_FILE)
    if line and not _NQN.fullmatch(line):
        raise _malformed(_NQN_FILE, "an NQN (nqn.yyyy-mm...) of at most 223 bytes", line)
    return line or None


def _stated_id() -> UUID | None:
    """Return the host ID of the kernel's initiator; None if there is none."""
    line = _read_line(_ID_FILE)
    if line and not _UUID.fullmatch(line):
        raise _malformed(_ID_FILE, "a UUID", line)
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


def _derived_id() -> UUID:
    """Return the UUID that is derived from the machine's ID."""
    machine = _read_line(_MACHINE_FILE)
    if not re.fullmatch(r"[0-9a-f]{32}", machine):
        got = ascii(machine[:_SHOWN_CHARACTERS]) if machine else "nothing"
        raise UsageError(
            f"find this host's NQN and ID: expected them in {_NQN_FILE} and {_ID_FILE}, or the ID "
            f"of the machine in {_MACHINE_FILE}, got {got} in the last; write the NQN "
            f"that the targets allow to {_NQN_FILE}, such as {_NQN_PREFIX}{uuid4()}, and its UUID "
            f"to {_ID_FILE}; or give hostnqn= and hostid= in the URI"
        )
    digest = hashlib.blake2s(bytes.fromhex(machine), digest_size=16, person=b"dlfshost").digest()
    return UUID(bytes=digest, version=4)
