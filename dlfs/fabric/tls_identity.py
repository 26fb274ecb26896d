"""Identities of TLS keys, by which a storage node finds the key of a host.

Most targets compute the identity from the key and both NQNs themselves. Where an administrator must
enter it, as into the kernel's keyring by hand, ``dlfs key identity`` prints it. An identity is no
secret: its digest of the key cannot be reversed. The recipe for nvmet contains the source of
``expand`` and ``derive``, and fills the keyring with them; so they use the standard library only.

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


def expand(digest: str, key: bytes, label: bytes, context: bytes) -> bytes:
    """Compute HKDF-Extract without a salt, then HKDF-Expand-Label for as many bytes as the hash."""
    count = hashlib.new(digest).digest_size
    extracted = hmac.new(b"", key, digest).digest()
    info = count.to_bytes(2, "big") + bytes([len(label)]) + label + bytes([len(context)]) + context
    return hmac.new(extracted, info + b"\1", digest).digest()


def derive(text: str, host_nqn: str, subsystem_nqn: str, version: int) -> tuple[str, bytes]:
    """Return the identity and the secret of a TLS handshake, from a valid key NVMeTLSkey-1."""
    _, hash_id, encoded, _ = text.split(":")
    key = base64.b64decode(encoded)[:-4]  # without its CRC
    digest, suite = ("sha256", 1) if len(key) == 32 else ("sha384", 2)
    retained = key if hash_id == "00" else expand(digest, key, b"tls13 HostNQN", host_nqn.encode())
    names = f"{host_nqn} {subsystem_nqn}"
    identity = context = f"NVMe{version}R{suite:02} {names}"
    if version == 1:
        check = hmac.new(retained, f"{names} NVMe-over-Fabrics".encode(), digest).digest()
        encoded = base64.b64encode(check).decode()
        identity, context = f"{identity} {encoded}", f"{suite:02} {encoded}"
    return identity, expand(digest, retained, b"tls13 nvme-tls-psk", context.encode())


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
    kind = text.partition(":")[0]
    if kind != "NVMeTLSkey-1":
        raise UsageError(f"compute a TLS identity: expected a key NVMeTLSkey-1, got {kind}")
    return derive(text, host_nqn, subsystem_nqn, version)[0]
