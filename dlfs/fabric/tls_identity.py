"""Identities of TLS keys, by which a storage node finds the key of a host.

Most targets compute the identity from the key and both NQNs themselves. Where an administrator must
enter it, as into the kernel's keyring by hand, ``dlfs key identity`` prints it. An identity is no
secret: its digest of the key cannot be reversed.

Source: NVM Express TCP Transport Specification 1.1, sections 3.6.1.2 to 3.6.1.4; RFC 5869; RFC
8446, section 7.1.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from dlfs.errors import UsageError

VERSIONS = (1, 0)
"""Versions of identities, in the order in which libdlfs offers them."""

_SUITES = {32: ("sha256", 1), 48: ("sha384", 2)}


def _expand(digest: str, key: bytes, label: bytes, context: bytes) -> bytes:
    """Compute HKDF-Extract without a salt, then HKDF-Expand-Label for as many bytes as the hash."""
    count = hashlib.new(digest).digest_size
    extracted = hmac.new(b"", key, digest).digest()
    info = count.to_bytes(2, "big") + bytes([len(label)]) + label + bytes([len(context)]) + context
    return hmac.new(extracted, info + b"\1", digest).digest()


def tls_identity(text: str, host_nqn: str, subsystem_nqn: str, *, version: int) -> str:
    """Return the identity that names a key in a TLS handshake.

    Args:
        text: the key as ``NVMeTLSkey-1:hh:...:``, valid.
        host_nqn: NQN of the host.
        subsystem_nqn: NQN of the subsystem.
        version: 0 or 1; version 1 has a digest of the key.

    Raises:
        UsageError: it is a key of another kind.
    """
    kind, hash_id, encoded, _ = text.split(":")
    if kind != "NVMeTLSkey-1":
        raise UsageError(f"compute a TLS identity: expected a key NVMeTLSkey-1, got {kind}")
    key = base64.b64decode(encoded)[:-4]  # without its CRC
    digest, suite = _SUITES[len(key)]
    names = f"{host_nqn} {subsystem_nqn}"
    identity = f"NVMe{version}R{suite:02} {names}"
    if version == 0:
        return identity
    retained = key if hash_id == "00" else _expand(digest, key, b"tls13 HostNQN", host_nqn.encode())
    check = hmac.new(retained, f"{names} NVMe-over-Fabrics".encode(), digest).digest()
    return f"{identity} {base64.b64encode(check).decode()}"
