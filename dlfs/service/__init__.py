"""The node service: what serves a volume to other processes. So far, the mount.

``mount_volume`` mounts in the background, ``serve`` in this process, ``unmount`` undoes either.
SEMANTICS.md says what programs may expect of a mount. pyfuse3 (extra ``pyfuse3``) is imported only
where the native server does not serve the mount.
"""
