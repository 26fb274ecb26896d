"""The boundary to libdlfs: the only package that knows ctypes.

``abi`` mirrors the header, ``library`` loads it, and one module a layer wraps its handles in
classes.
"""
