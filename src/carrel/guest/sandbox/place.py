"""The file system that a session sees, built in its own mount namespace and entered by pivot_root.

Everything writable (workspace, home, /tmp, /dev/shm) lies on one tmpfs whose size is the disk limit. That tmpfs, the
workspace's lower layer and an unmasked /proc stay mounted in a hidden folder, which only init can still reach:
it is init's working directory, covered for everybody else. A live fork is built from there.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable

from .. import syscalls
from . import copying, etc_files, mounts
from .plan import Plan

HIDDEN = "/.carrel"
LOWER, KEPT, HOME_LOWER = "lower", "kept", "home-lower"
WRITABLE = ("upper", "work", "tmp", "home", "home-work", "shm")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# What reads the number of processors, caches and memory nodes looks here; nothing else of /sys is shown.
MACHINE_FACTS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
PROC_SEALED = ("bus", "fs", "irq", "sys", "sysrq-trigger")
PROC_EMPTY_FILES = [
    "kcore",
    "keys",
    "key-users",
    "kmsg",
    "kallsyms",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
    "timer_list",
    "sched_debug",
    "latency_stats",
    "config.gz",
    "cmdline",
    "modules",
    "iomem",
    "ioports",
    "slabinfo",
    "vmallocinfo",
    "pagetypeinfo",
    "mdstat",
]
PROC_EMPTY_FOLDERS = ("acpi", "scsi")

# Folders of the host, one of which is covered while the new root is made.
COVERED = ("/sys", "/tmp", "/run", "/mnt")

Step = Callable[[str], None]


class Place:
    """Built in two parts: what all sessions of a kind have in common, and what this one was given."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self.plan = plan
        self.step = step
        self.root = ""
        self.aside: mounts.Tree | None = None
        self.given: dict[str, mounts.Tree] = {}
        self.system: list[tuple[str, mounts.Tree]] = []
        self.links: dict[str, str] = {}

    def uncover(self) -> None:
        """Our root, half built, covers a folder of the host; where that is part of what was given, it is put aside."""
        wanted = [os.path.realpath(path) for path in self._wanted().values()]
        if any(is_in(path, self.root) or is_in(self.root, path) for path in wanted):
            self.step("put the new root aside")
            self.aside = mounts.Tree(self.root)
            syscalls.unmount(self.root)

    def take_given(self, idmap_for: Callable[[str], int | None]) -> None:
        """Copies of the mounts that the settings name; as root this happens before root is given up."""
        for name, path in self._wanted().items():
            self.step(f"open {path}")
            self.given[name] = self._tree(path, idmap_for(path))

    def _wanted(self) -> dict[str, str]:
        workspace = self.plan.workspace
        wanted = {mount.at: mount.source for mount in self.plan.mounts}
        wanted.update({path: path for path in readonly(self.plan)})
        home = self.plan.home_source if self.plan.home_begins else None
        for name, path in ((LOWER, workspace.source), (KEPT, workspace.upper_dir), (HOME_LOWER, home)):
            if path:
                wanted[name] = path
        return wanted

    @staticmethod
    def _tree(path: str, idmap: int | None) -> mounts.Tree:
        try:
            return mounts.Tree(path, idmap=idmap)
        except OSError:
            # Some file systems cannot be mapped; the files are then seen with the owners they have.
            if idmap is None:
                raise
            return mounts.Tree(path)

    def close_given(self) -> None:
        for tree in self.given.values():
            tree.close()

    def take_system(self) -> None:
        self.step("open system folders")
        self.system.append(("/usr", mounts.Tree("/usr")))
        for name in MERGED:
            path = "/" + name
            if os.path.islink(path):
                self.links[path] = os.readlink(path)
            elif os.path.isdir(path):
                self.system.append((path, mounts.Tree(path)))
        for path in present((*etc_files.BOUND, *MACHINE_FACTS)):
            self.system.append((path, mounts.Tree(path)))

    def begin(self) -> None:
        """The system's part, beside the host's file system, which is still there."""
        plan = self.plan
        self.step("make mounts private")
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        self.take_system()
        devices = [(name, mounts.Tree("/dev/" + name)) for name in DEVICES if os.path.exists("/dev/" + name)]
        etc = etc_files.written(plan.uid, plan.home, plan.hostname, plan.network)
        self.step("mount the new root")
        root = next(path for path in COVERED if os.path.isdir(path))
        # A generous count of inodes: targets for mounts only, and read-only in the end.
        mounts.tmpfs(root, size=4 << 20, files=4096)
        for path, target in self.links.items():
            os.symlink(target, root + path)
        etc_files.write_all(root, etc)
        for path, tree in self.system:
            self.step(f"mount {path}")
            tree.attach(root + path, mounts.READ_ONLY)
        self._hidden(root)
        self._dev(root, devices)
        self._proc(root)
        self._temporary(root)
        self.root = root

    def finish(self) -> None:
        """From the host's file system to ours; afterwards nothing of the host is reachable but what was given."""
        self.step("pivot_root")
        if self.aside is not None:
            self.aside.attach(self.root, 0)
        os.chdir(self.root)
        syscalls.pivot_root(".", ".")
        syscalls.unmount(".")
        # Only now: a link in a given folder must not lead what is mounted below it out of the new root.
        self._home()
        self._given()
        os.chdir(HIDDEN)
        self.step("hide init's folder")
        mounts.tmpfs(HIDDEN, size=4096, files=2, mode="000", flags=syscalls.MS_RDONLY)
        self.step("seal the root")
        mounts.seal("/dev")
        mounts.seal("/")

    def _hidden(self, root: str) -> None:
        self.step("mount the scratch space")
        hidden, limits = root + HIDDEN, self.plan.limits
        mounts.tmpfs(hidden, size=1 << 20, files=1024, mode="700")
        mounts.tmpfs(hidden + "/scratch", size=limits.disk, files=limits.files, mode="700")
        for name in WRITABLE:
            os.mkdir(f"{hidden}/scratch/{name}", 0o1777 if name in ("tmp", "shm") else 0o755)
        os.chmod(hidden + "/scratch/tmp", 0o1777)
        os.chmod(hidden + "/scratch/shm", 0o1777)
        # A new /proc may only be mounted in a user namespace where an unmasked one is: for the forks to come.
        os.mkdir(hidden + "/proc")
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        self.step("mount /proc")
        syscalls.mount("proc", hidden + "/proc", "proc", flags)

    def _dev(self, root: str, devices: list[tuple[str, mounts.Tree]]) -> None:
        self.step("mount /dev")
        dev = root + "/dev"
        mounts.tmpfs(dev, size=1 << 16, files=64, flags=syscalls.MS_NOEXEC)
        for name, tree in devices:
            tree.attach(f"{dev}/{name}", syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC)
        for name, target in LINKS.items():
            os.symlink(target, f"{dev}/{name}")
        os.mkdir(dev + "/pts")
        flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
        syscalls.mount("devpts", dev + "/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=0620")
        mounts.bind(f"{root}{HIDDEN}/scratch/shm", dev + "/shm", mounts.HARMLESS | syscalls.MOUNT_ATTR_NOEXEC)

    def _proc(self, root: str) -> None:
        mask_proc(root + HIDDEN + "/proc", root + "/proc", root + "/dev/null")

    def _temporary(self, root: str) -> None:
        self.step("mount /tmp")
        scratch = f"{root}{HIDDEN}/scratch"
        mounts.bind(scratch + "/tmp", root + "/tmp", mounts.HARMLESS)
        os.makedirs(root + "/var", exist_ok=True)
        mounts.bind(scratch + "/tmp", root + "/var/tmp", mounts.HARMLESS)

    def _home(self) -> None:
        self.step("mount the home")
        if self.plan.home_begins:
            self.given[HOME_LOWER].attach(f"{HIDDEN}/{HOME_LOWER}", mounts.READ_ONLY)
            if "overlay" not in self.plan.parts:
                copying.copy_tree(f"{HIDDEN}/{HOME_LOWER}", f"{HIDDEN}/scratch/home")
        if self.plan.home != self.plan.workspace.at:
            show_home(self.plan, HIDDEN)

    def _given(self) -> None:
        self._workspace()
        for path in readonly(self.plan):
            self.step(f"mount {path}")
            self.given[path].attach(path, mounts.READ_ONLY)
        for mount in self.plan.mounts:
            self.step(f"mount {mount.at}")
            attributes = mounts.READ_ONLY if mount.mode == "ro" else mounts.HARMLESS
            self.given[mount.at].attach(mount.at, attributes)

    def _workspace(self) -> None:
        """An overlay over the given folder, the folder itself, or an empty one."""
        workspace = self.plan.workspace
        target, hidden = workspace.at, HIDDEN
        self.step(f"mount the workspace ({workspace.mode})")
        if workspace.upper_dir:
            self.given[KEPT].attach(hidden + "/kept", mounts.HARMLESS)
            for name in ("upper", "work"):
                os.makedirs(f"{hidden}/kept/{name}", mode=0o755, exist_ok=True)
        upper_parent = "kept" if workspace.upper_dir else "scratch"
        if workspace.source is not None and workspace.mode == "overlay":
            self.given[LOWER].attach(hidden + "/lower", mounts.READ_ONLY)
        if self.plan.copied:
            copying.copy_tree(hidden + "/lower", f"{hidden}/{upper_parent}/upper")
        if workspace.source is None or self.plan.copied:
            mounts.bind(f"{hidden}/{upper_parent}/upper", target, mounts.HARMLESS)
        elif self.plan.overlaid:
            os.chdir(hidden)
            mounts.overlay("lower", f"{upper_parent}/upper", f"{upper_parent}/work", target)
            os.chdir("/")
        else:
            attributes = mounts.READ_ONLY if workspace.mode == "ro" else mounts.HARMLESS
            self.given[LOWER].attach(target, attributes)


def show_home(plan: Plan, hidden: str) -> None:
    """An overlay over what it begins with, or the folder that is written to itself."""
    if not plan.home_begins or "overlay" not in plan.parts:
        mounts.bind(f"{hidden}/scratch/home", plan.home, mounts.HARMLESS)
        return
    # By its descriptor: the folder of a fork has a name that leads to it no longer.
    before = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir(hidden)
        mounts.overlay(HOME_LOWER, "scratch/home", "scratch/home-work", plan.home)
        os.fchdir(before)
    finally:
        os.close(before)


def is_in(path: str, folder: str) -> bool:
    """Whether it is that folder, or something in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def readonly(plan: Plan) -> list[str]:
    """The folders to show at their own paths, without those that are inside others or in the system."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in plan.readonly}, key=len):
        if not any(is_in(path, upper) for upper in ("/usr", *kept)):
            kept.append(path)
    return kept


def mask_proc(clean: str, target: str, null: str) -> None:
    """Show a /proc at `target` whose dangerous parts are read-only or empty."""
    mounts.bind(clean, target, mounts.HARMLESS | syscalls.MOUNT_ATTR_NOEXEC)
    for name in PROC_SEALED:
        if os.path.exists(f"{target}/{name}"):
            mounts.bind(f"{clean}/{name}", f"{target}/{name}", mounts.READ_ONLY | syscalls.MOUNT_ATTR_NOEXEC)
    for name in PROC_EMPTY_FILES:
        if _can_be_read(f"{target}/{name}"):
            mounts.bind(null, f"{target}/{name}", syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID)
    for name in PROC_EMPTY_FOLDERS:
        if os.path.isdir(f"{target}/{name}"):
            mounts.tmpfs(f"{target}/{name}", size=4096, files=2, mode="555", flags=syscalls.MS_RDONLY)


def _can_be_read(path: str) -> bool:
    """Many of them only the host's root can read, which no session is; a mount for nothing costs time."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return bool(found.st_mode & 0o004) or found.st_uid == os.getuid()


@functools.cache
def present(paths: tuple[str, ...]) -> list[str]:
    """Those that this host has; asked once, by the zygote."""
    return [path for path in paths if os.path.exists(path)]


def host_files() -> list[tuple[int, ...]]:
    """Which files of the host a place is built of: an update puts another in the place of one, or changes what is
    copied."""
    system = ("/usr", *(f"/{name}" for name in MERGED), *etc_files.BOUND, *MACHINE_FACTS)
    return [_identity(path) for path in (*system, *etc_files.OF_THE_NETWORK)]


def _identity(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    changed = 0 if stat.S_ISDIR(found.st_mode) else found.st_ctime_ns
    return found.st_dev, found.st_ino, changed
