"""The boundary to libdlfs: the only package that knows ctypes.

``abi`` mirrors the header, ``library`` loads it, and each module wraps the handles of one layer in
classes.
"""
