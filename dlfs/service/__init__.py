"""The node service: what serves a volume to other processes. So far, the mount.

``mount_volume`` mounts in the background, ``serve`` in this process, ``unmount`` undoes either.
SEMANTICS.md says what programs may expect of a mount. Needs pyfuse3 (``pip install
'dlfs[mount]'``), which is only imported when something is mounted.
"""
