"""The host NQN and host ID by which an NVMe-oF target knows this host.

Both are those of the kernel's initiator if /etc/nvme has them. Otherwise both are derived by a hash
from the machine's ID, which machine-id(5) asks not to publish. On a machine without an ID each
process generates random ones. A forked child is the same host.

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
def _generated_id() -> UUID:
    machine = _read_line(_MACHINE_FILE)
    if not re.fullmatch(r"[0-9a-f]{32}", machine):
        return uuid4()
    digest = hashlib.blake2s(bytes.fromhex(machine), digest_size=16, person=b"dlfshost").digest()
    return UUID(bytes=digest, version=4)


def host_nqn() -> str:
    """Return the NQN of this host, at most 223 bytes."""
    line = _read_line(_NQN_FILE)
    return line if _NQN.fullmatch(line) else f"{_NQN_PREFIX}{_generated_id()}"


def host_id() -> UUID:
    """Return the host ID that belongs to ``host_nqn``."""
    for text in (_read_line(_ID_FILE), _read_line(_NQN_FILE).removeprefix(_NQN_PREFIX)):
        if _UUID.fullmatch(text):
            return UUID(text)
    return _generated_id()
