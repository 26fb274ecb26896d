"""Who this host is to an NVMe-oF target: its NQN and its ID.

As the kernel's initiator tells it, where /etc/nvme says so. Else both are derived from the
machine's ID, which itself is not to be told to others, with a hash of DLFS's own; on a machine
without one they are made up anew by each process. A forked child is the same host.

Source: NVM Express Base Specification 2.0, section 4.5 (the UUID form of NQNs); machine-id(5).
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from uuid import UUID, uuid4

_NQN_FILE = Path("/etc/nvme/hostnqn")
_ID_FILE = Path("/etc/nvme/hostid")
_MACHINE_FILE = Path("/etc/machine-id")
_NQN_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"
_NQN = re.compile(r"nqn\.\d{4}-\d{2}\.[\x21-\x7e]{1,211}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def _read_line(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").partition("\n")[0].strip()
    except OSError:
        return ""


@functools.cache
def _made_up() -> UUID:
    machine = _read_line(_MACHINE_FILE)
    if not re.fullmatch(r"[0-9a-f]{32}", machine):
        return uuid4()
    digest = hashlib.blake2s(bytes.fromhex(machine), digest_size=16, person=b"dlfshost").digest()
    return UUID(bytes=digest, version=4)


def host_nqn() -> str:
    """The NQN of this host, at most 223 bytes."""
    line = _read_line(_NQN_FILE)
    return line if _NQN.fullmatch(line) else f"{_NQN_PREFIX}{_made_up()}"


def host_id() -> UUID:
    """The ID that belongs to ``host_nqn``."""
    for text in (_read_line(_ID_FILE), _read_line(_NQN_FILE).removeprefix(_NQN_PREFIX)):
        if _UUID.fullmatch(text):
            return UUID(text)
    return _made_up()
