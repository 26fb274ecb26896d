"""The controller's side of DH-HMAC-CHAP, written apart from the initiator's: Python's own hashes.

A test may change each message of the controller, to see what the host does about it. With secure
channel concatenation, the controller generates a TLS key, too, which a ``TlsProxy`` then knows.

Source: NVM Express Base Specification 2.1, section 8.3.4.5; RFC 7919, appendix A (each prime is
``2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1``).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from tests.support.nvme.tls import Psk, generated_psk

HASHES = {1: "sha256", 2: "sha384", 3: "sha512"}
_PRIMES = {1: (2048, 560316), 2: (3072, 2625351), 3: (4096, 5736041), 4: (6144, 15705020),
           5: (8192, 10965728)}  # fmt: skip
GROUPS = (0, *_PRIMES)
_EXPONENT_BITS = 512
FAILED = 1
INCORRECT_MESSAGE = 7

Change = Callable[[str, bytes], bytes]


@cache
def prime(group: int) -> int:
    """Return the prime of a group of RFC 7919."""
    bits, offset = _PRIMES[group]
    terms = 1 + bits // 5  # 1/n! is below 2^-bits from there on
    e = sum((Fraction(1, math.factorial(n)) for n in range(terms)), Fraction(0))
    whole = math.floor(e * (1 << bits - 130))
    return (1 << bits) - (1 << bits - 64) + (whole + offset << 64) - 1


def transformed(key: str, nqn: str) -> bytes:
    """Return the key of a representation, transformed with an NQN."""
    _, kind, code, _ = key.split(":")
    secret = base64.b64decode(code)[:-4]
    if kind == "00":
        return secret
    return hmac.digest(secret, nqn.encode() + b"NVMe-over-Fabrics", HASHES[int(kind)])


@dataclass
class Authentication:
    """The proof that a subsystem demands of its hosts.

    Attributes:
        host_key: key of the host, in its representation.
        controller_key: key of the controller; None: it answers no challenge.
        hash: identifier of the hash that it chooses.
        group: identifier of the Diffie-Hellman group that it chooses.
        secure_channel: demand secure channel concatenation of hosts.
        generated: gets the TLS key of each concatenation.
        change: gets the name and the bytes of each message that it sends; returns those to send.
        failures: explanation of every Failure2 that hosts sent.
        successes: number of authentications that ended well.
    """

    host_key: str
    controller_key: str | None = None
    hash: int = 1
    group: int = 1
    secure_channel: bool = False
    generated: list[Psk] = field(default_factory=list)
    change: Change | None = None
    failures: list[int] = field(default_factory=list)
    successes: int = 0


class Responder:
    """Authenticates the host of one queue; a queue may authenticate again."""

    def __init__(self, terms: Authentication, host_nqn: str, subsystem_nqn: str) -> None:
        self.terms = terms
        self.done = False
        self._names = (host_nqn.encode(), subsystem_nqn.encode())
        self._message = b""
        self._transaction = 0
        self._secret = 0
        self._sequence = 0
        self._challenge = b""
        self._secure_channel = 0

    def send(self, message: bytes) -> bool:
        """Process a message of the host; return False if it is malformed."""
        kind = message[:2]
        if len(message) < 8:
            return False
        if kind == b"\0\xf0":
            self.terms.failures.append(message[7])
            self.done = False
            return True
        if kind == b"\0\0":
            return self._negotiate(message)
        if struct.unpack_from("<H", message, 4)[0] != self._transaction:
            return False
        if kind == b"\1\2":
            return self._reply(message)
        return kind == b"\1\4"

    def receive(self, length: int) -> bytes:
        """Return the controller's next message."""
        return self._message[:length]

    def _say(self, name: str, message: bytes) -> None:
        self._message = self.terms.change(name, message) if self.terms.change else message

    def _negotiate(self, message: bytes) -> bool:
        (self._transaction,) = struct.unpack_from("<H", message, 4)
        self._secure_channel = message[6]
        hashes, groups = message[10], message[11]
        offered = message[12 : 12 + hashes], message[42 : 42 + groups]
        terms = self.terms
        if len(message) != 72 or terms.hash not in offered[0] or terms.group not in offered[1]:
            return False
        self._challenge = os.urandom(self._size)
        self._sequence = int.from_bytes(os.urandom(4), "little") | 1
        value = b""
        if terms.group:
            self._secret = int.from_bytes(os.urandom(_EXPONENT_BITS // 8), "big")
            value = self._encode(pow(2, self._secret, prime(terms.group)))
        fields = (1, 1, 0, self._transaction, self._size, 0, terms.hash, terms.group, len(value))
        header = struct.pack("<BBHHBBBBHI", *fields, self._sequence)
        self._say("challenge", header + self._challenge + value)
        return True

    @property
    def _size(self) -> int:
        return {1: 32, 2: 48, 3: 64}[self.terms.hash]

    def _encode(self, value: int) -> bytes:
        return value.to_bytes((prime(self.terms.group).bit_length() + 7) // 8, "big")

    def _response(self, key: bytes, challenge: bytes, sequence: int, role: bytes, *,
                  shared: bytes, names: tuple[bytes, bytes]) -> bytes:  # fmt: skip
        digest = HASHES[self.terms.hash]
        if shared:
            challenge = hmac.digest(shared, challenge, digest)
        numbers = struct.pack("<IHB", sequence, self._transaction, self._secure_channel)
        text = challenge + numbers + role
        return hmac.digest(key, text + names[0] + b"\0" + names[1], digest)

    def _reply(self, message: bytes) -> bool:
        size, wants = message[6], message[8]
        length, sequence = struct.unpack_from("<HI", message, 10)
        if size != self._size or len(message) != 16 + 2 * size + length:
            return False
        response, challenge = message[16 : 16 + size], message[16 + size : 16 + 2 * size]
        shared = b""
        if self.terms.group:
            peer = int.from_bytes(message[16 + 2 * size :], "big")
            secret = self._encode(pow(peer, self._secret, prime(self.terms.group)))
            shared = hashlib.new(HASHES[self.terms.hash], secret).digest()
        host_nqn, subsystem_nqn = self._names
        expected = self._response(
            transformed(self.terms.host_key, host_nqn.decode()), self._challenge, self._sequence,
            b"HostHost", shared=shared, names=(host_nqn, subsystem_nqn),
        )  # fmt: skip
        if not hmac.compare_digest(response, expected):
            failure = struct.pack("<BBHHBB", 0, 0xF1, 0, self._transaction, 1, FAILED)
            self._say("failure1", failure)
            return True
        proof = b""
        if wants and sequence and self.terms.controller_key is not None:
            proof = self._response(
                transformed(self.terms.controller_key, subsystem_nqn.decode()), challenge, sequence,
                b"Controller", shared=shared, names=(subsystem_nqn, host_nqn),
            )  # fmt: skip
        if self._secure_channel:
            key = hmac.digest(shared, self._challenge + challenge, HASHES[self.terms.hash])
            names = (host_nqn.decode(), subsystem_nqn.decode())
            self.terms.generated.append(generated_psk(key, *names))
        self.done = True
        self.terms.successes += 1
        fields = (1, 3, 0, self._transaction, size if proof else 0, 0, bool(proof))
        self._say("success1", struct.pack("<BBHHBBB7x", *fields) + proof)
        return True
