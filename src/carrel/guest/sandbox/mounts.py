"""Mounts: trees of the host's mounts, restricted and attached at their targets."""

from __future__ import annotations

import os
import stat

from .. import syscalls

HARMLESS = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
READ_ONLY = HARMLESS | syscalls.MOUNT_ATTR_RDONLY


class MountTree:
    """A detached copy of the mounts at a path of the host; attached once, or closed."""

    def __init__(self, path: str, *, idmap: int | None = None) -> None:
        self.path = path
        self.is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        # An id-mapped tree is one mount: file systems mounted below it may be of a kind that cannot be mapped.
        self.descriptor = syscalls.open_tree(path, recursive=idmap is None)
        if idmap is not None:
            try:
                syscalls.mount_setattr(self.descriptor, 0, recursive=False, idmap=idmap)
            except OSError:
                self.close()
                raise

    @classmethod
    def from_descriptor(cls, path: str, descriptor: int) -> MountTree:
        """A tree that another process has opened."""
        tree = cls.__new__(cls)
        tree.path, tree.descriptor = path, descriptor
        tree.is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        return tree

    def attach(self, target: str, attributes: int) -> None:
        """Mount it there, with these attributes on every mount in it."""
        if attributes:
            syscalls.mount_setattr(self.descriptor, attributes)
        make_target(target, self.is_folder)
        syscalls.move_mount(self.descriptor, target)
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def make_target(path: str, is_folder: bool) -> None:
    """Create a file or folder to mount on, unless there is one."""
    if is_folder:
        make_folder(path)
    elif not os.path.lexists(path):
        make_folder(os.path.dirname(path))
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def make_folder(path: str) -> None:
    """With its parents. `os.makedirs` would check each of them first, and most exist."""
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        return
    except FileNotFoundError:
        os.makedirs(path, mode=0o755, exist_ok=True)


def bind(source: str, target: str, attributes: int) -> None:
    MountTree(source).attach(target, attributes)


def tmpfs(target: str, *, size: int | None, files: int | None, mode: str = "755", flags: int = 0) -> None:
    """Mount a file system in memory; `size` and `files` limit it."""
    options = [f"mode={mode}", f"size={size or '50%'}"]
    if files is not None:
        options.append(f"nr_inodes={files}")
    make_folder(target)
    syscalls.mount("tmpfs", target, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV | flags, ",".join(options))


def overlay(lower: str, upper: str, work: str, target: str) -> None:
    """Mount an overlay. The paths are relative, so that no character of a host path has to be escaped."""
    make_folder(target)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
    syscalls.mount("overlay", target, "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)


def make_read_only(path: str) -> None:
    """Make the mount at a path read-only, and only that one."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscalls.mount_setattr(descriptor, READ_ONLY, recursive=False)
    finally:
        os.close(descriptor)
