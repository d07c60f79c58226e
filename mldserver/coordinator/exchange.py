"""Two folders change places in one step: what a revision needs to replace an output under its readers' eyes.

A rename cannot replace a folder that is not empty, and deleting it first would show readers nothing for a moment.
Linux does it with ``renameat2(RENAME_EXCHANGE)`` (Linux 3.15; glibc 2.28; ext4, xfs, btrfs, tmpfs, overlayfs and
others). Python has no wrapper for it.
"""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["exchange"]

_HERE = -100
"""AT_FDCWD: paths are absolute, or relative to the working directory."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of linux/fs.h."""


def exchange(one: str, other: str) -> None:
    """Swap what two paths name, atomically. Both must exist, on one file system.

    Raises OSError; ENOSYS or EINVAL where the system or the file system cannot do it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), one, None, other)
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one, None, other)
