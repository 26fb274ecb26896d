"""Certificates that a server makes for one run, by libdlfs_security."""

from __future__ import annotations

import ctypes

from dlfs._native.versions import load_security
from dlfs.errors import NativeError

_PEM_BYTES = 4096


def make_certificate() -> tuple[bytes, bytes]:
    """Generate a key, and a certificate that it signs itself; return the certificate and the key.

    Both are PEM. The key is on the curve P-256.

    Raises:
        NativeError: this DLFS was built without OpenSSL, or OpenSSL failed.
    """
    call = load_security().dlfs_security_make_certificate
    call.argtypes = [ctypes.c_char_p, ctypes.c_size_t] * 2
    call.restype = ctypes.c_int
    certificate, key = (ctypes.create_string_buffer(_PEM_BYTES) for _ in range(2))
    try:
        if code := call(certificate, _PEM_BYTES, key, _PEM_BYTES):
            raise NativeError(f"make a certificate: OpenSSL failed with {code}")
        return certificate.value, key.value
    finally:
        ctypes.memset(key, 0, _PEM_BYTES)
