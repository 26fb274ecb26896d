"""Programs in a mount namespace of their own, in which the mounts of other tests are not."""

from __future__ import annotations

DETACH_OTHERS = r"""
awk '/ - fuse/ { print $5 }' /proc/self/mountinfo | while read -r at; do
    umount -l "$(printf %b "$at")" 2>/dev/null || :  # below another one, it is gone with that
done
"""
"""Script that detaches the copies of FUSE mounts, which would stay after they are unmounted."""


def in_own_mounts(script: str, *options: str) -> list[str]:
    """Return a command that runs a shell script in a mount namespace of its own.

    Args:
        script: the script; ``$1`` and so on are the arguments that follow the command.
        options: options of unshare(1), such as ``--net``.
    """
    return ["unshare", "--mount", *options, "sh", "-ec", f"{DETACH_OTHERS}\n{script}", "sh"]
