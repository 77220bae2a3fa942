"""The file system that a session sees, built in its own mount namespace and entered by pivot_root.

Everything writable (workspace, home, /tmp, /dev/shm) is on one tmpfs whose size is the disk limit. That tmpfs, the
workspace's lower layer and an unmasked /proc stay mounted in a hidden folder that only init can still reach: it is
init's working directory, and covered for all others. The file systems of live forks are built from there.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable

from .. import syscalls
from . import copy_tree
from .spec import SandboxSpec

HIDDEN = "/.carrel"
LOWER, KEPT, HOME_LOWER = "lower", "kept", "home-lower"
WRITABLE = ("upper", "work", "tmp", "home", "home-work", "shm")
CHANGES = ("upper", "work", "home", "home-work")
"""Those of them that may be kept on the host, in a folder for each generation."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Programs read the number of processors, caches and memory nodes here; nothing else of /sys is visible.
MACHINE_FACTS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
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

ETC_BOUND = (
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/ssl/certs",
)
"""Mounted from the host, read-only: how to find libraries and fonts, and which certificates to trust."""
ETC_COPIED = (
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
)
"""Small files that are copied from the host, which is faster than a mount."""
_ETC_OF_NETWORK = ("/etc/hosts", "/etc/resolv.conf")
"""What a session with the network gets of these is written at its start."""
_MAX_ETC_FILE = 256 * 1024

_ROOT_TARGETS = ("/sys", "/tmp", "/run", "/mnt")
"""Folders of the host; the new root is mounted on the first that exists while it is built."""

Step = Callable[[str], None]
"""Called with the name of each step before it begins, to report which one failed."""


class RootFs:
    """Built in two parts: first what all sessions of a kind have in common, then the folders given to this one."""

    def __init__(self, spec: SandboxSpec, step: Step) -> None:
        self.spec = spec
        self.step = step
        self.given: dict[str, MountTree] = {}
        """The mounts that the spec names, by their target or by the name of a hidden folder."""
        self._root = ""
        self._set_aside: MountTree | None = None
        self._system: list[tuple[str, MountTree]] = []
        self._links: dict[str, str] = {}

    # --- mounts that the spec names -----------------------------------------------------------------------------------

    def uncover(self) -> None:
        """Set the half-built root aside where it covers a folder that the spec names."""
        wanted = [os.path.realpath(path) for path in self._wanted().values()]
        if any(is_in(path, self._root) or is_in(self._root, path) for path in wanted):
            self.step("set the new root aside")
            self._set_aside = MountTree(self._root)
            syscalls.unmount(self._root)

    def open_given(self, idmap_for: Callable[[str], int | None]) -> None:
        """Copy the mounts that the spec names; as root this happens before root is given up."""
        for name, path in self._wanted().items():
            self.step(f"open {path}")
            self.given[name] = self._open(path, idmap_for(path))

    def _wanted(self) -> dict[str, str]:
        workspace = self.spec.workspace
        wanted = {mount.at: mount.source for mount in self.spec.mounts}
        wanted.update({path: path for path in readonly_folders(self.spec)})
        home = self.spec.home_source if self.spec.has_home_source else None
        for name, path in ((LOWER, workspace.source), (KEPT, workspace.upper_dir), (HOME_LOWER, home)):
            if path:
                wanted[name] = path
        return wanted

    @staticmethod
    def _open(path: str, idmap: int | None) -> MountTree:
        try:
            return MountTree(path, idmap=idmap)
        except OSError:
            # Some file systems cannot be id-mapped; the session then sees the owners that the files have.
            if idmap is None:
                raise
            return MountTree(path)

    def close_given(self) -> None:
        for tree in self.given.values():
            tree.close()

    # --- the first part -----------------------------------------------------------------------------------------------

    def build(self) -> None:
        """The system's part, beside the host's file system, which is still there."""
        spec = self.spec
        self.step("make mounts private")
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        self._open_system()
        devices = [(name, MountTree("/dev/" + name)) for name in DEVICES if os.path.exists("/dev/" + name)]
        etc = _etc_files(spec.uid, spec.home, spec.hostname, spec.network)
        self.step("mount the new root")
        root = next(path for path in _ROOT_TARGETS if os.path.isdir(path))
        # A generous number of inodes: only mount targets use them, and it is read-only in the end.
        tmpfs(root, size=4 << 20, files=4096)
        for path, target in self._links.items():
            os.symlink(target, root + path)
        _write_etc(root, etc)
        for path, tree in self._system:
            self.step(f"mount {path}")
            tree.attach(root + path, READ_ONLY)
        self._mount_hidden(root)
        self._mount_dev(root, devices)
        mask_proc(root + HIDDEN + "/proc", root + "/proc", root + "/dev/null")
        self._mount_tmp(root)
        self._root = root

    def _open_system(self) -> None:
        self.step("open system folders")
        self._system.append(("/usr", MountTree("/usr")))
        for name in MERGED:
            path = "/" + name
            if os.path.islink(path):
                self._links[path] = os.readlink(path)
            elif os.path.isdir(path):
                self._system.append((path, MountTree(path)))
        for path in existing((*ETC_BOUND, *MACHINE_FACTS)):
            self._system.append((path, MountTree(path)))

    def _mount_hidden(self, root: str) -> None:
        self.step("mount the scratch space")
        hidden, limits = root + HIDDEN, self.spec.limits
        tmpfs(hidden, size=1 << 20, files=1024, mode="700")
        tmpfs(hidden + "/scratch", size=limits.disk, files=limits.files, mode="700")
        for name in WRITABLE:
            os.mkdir(f"{hidden}/scratch/{name}", 0o1777 if name in ("tmp", "shm") else 0o755)
        os.chmod(hidden + "/scratch/tmp", 0o1777)
        os.chmod(hidden + "/scratch/shm", 0o1777)
        # For live forks: a new /proc may only be mounted in a user namespace that has an unmasked one.
        os.mkdir(hidden + "/proc")
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        self.step("mount /proc")
        syscalls.mount("proc", hidden + "/proc", "proc", flags)

    def _mount_dev(self, root: str, devices: list[tuple[str, MountTree]]) -> None:
        self.step("mount /dev")
        dev = root + "/dev"
        tmpfs(dev, size=1 << 16, files=64, flags=syscalls.MS_NOEXEC)
        for name, tree in devices:
            tree.attach(f"{dev}/{name}", syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC)
        for name, target in LINKS.items():
            os.symlink(target, f"{dev}/{name}")
        os.mkdir(dev + "/pts")
        flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
        syscalls.mount("devpts", dev + "/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=0620")
        bind(f"{root}{HIDDEN}/scratch/shm", dev + "/shm", HARMLESS | syscalls.MOUNT_ATTR_NOEXEC)

    def _mount_tmp(self, root: str) -> None:
        self.step("mount /tmp")
        scratch = f"{root}{HIDDEN}/scratch"
        bind(scratch + "/tmp", root + "/tmp", HARMLESS)
        os.makedirs(root + "/var", exist_ok=True)
        bind(scratch + "/tmp", root + "/var/tmp", HARMLESS)

    # --- the second part ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make the new root the root, and mount what was given; nothing else of the host is reachable afterwards."""
        self.step("pivot_root")
        if self._set_aside is not None:
            self._set_aside.attach(self._root, 0)
        os.chdir(self._root)
        syscalls.pivot_root(".", ".")
        syscalls.unmount(".")
        # Only now: a symlink in a given folder cannot lead a mount below it out of the new root any more.
        if self.spec.workspace.upper_dir:
            self.step("mount the folder of the changes")
            self.given[KEPT].attach(f"{HIDDEN}/{KEPT}", HARMLESS)
            make_changes_folder(f"{HIDDEN}/{changes_folder(self.spec)}")
        self._mount_home()
        self._mount_workspace()
        self._mount_given()
        os.chdir(HIDDEN)
        self.step("hide init's folder")
        tmpfs(HIDDEN, size=4096, files=2, mode="000", flags=syscalls.MS_RDONLY)
        self.step("make the root read-only")
        make_read_only("/dev")
        make_read_only("/")

    def _mount_home(self) -> None:
        self.step("mount the home")
        if self.spec.has_home_source:
            self.given[HOME_LOWER].attach(f"{HIDDEN}/{HOME_LOWER}", READ_ONLY)
            if "overlay" not in self.spec.parts:
                _copy_once(f"{HIDDEN}/{HOME_LOWER}", f"{HIDDEN}/{changes_folder(self.spec)}/home")
        if self.spec.home != self.spec.workspace.at:
            mount_home(self.spec, HIDDEN)

    def _mount_workspace(self) -> None:
        """An overlay over the given folder, the folder itself, or an empty one."""
        workspace = self.spec.workspace
        target, hidden = workspace.at, HIDDEN
        self.step(f"mount the workspace ({workspace.mode})")
        changes = changes_folder(self.spec)
        if workspace.source is not None and workspace.mode == "overlay":
            self.given[LOWER].attach(hidden + "/lower", READ_ONLY)
        if self.spec.workspace_is_copy:
            _copy_once(hidden + "/lower", f"{hidden}/{changes}/upper")
        if workspace.source is None or self.spec.workspace_is_copy:
            bind(f"{hidden}/{changes}/upper", target, HARMLESS)
        elif self.spec.workspace_is_overlay:
            os.chdir(hidden)
            overlay("lower", f"{changes}/upper", f"{changes}/work", target)
            os.chdir("/")
        else:
            attributes = READ_ONLY if workspace.mode == "ro" else HARMLESS
            self.given[LOWER].attach(target, attributes)

    def _mount_given(self) -> None:
        for path in readonly_folders(self.spec):
            self.step(f"mount {path}")
            self.given[path].attach(path, READ_ONLY)
        for mount in self.spec.mounts:
            self.step(f"mount {mount.at}")
            attributes = READ_ONLY if mount.mode == "ro" else HARMLESS
            self.given[mount.at].attach(mount.at, attributes)


def changes_folder(spec: SandboxSpec) -> str:
    """Where, in the hidden folder, the changes of the workspace and the home are: on the host's disk, or in memory."""
    return f"{KEPT}/{spec.workspace.generation}" if spec.workspace.generation else "scratch"


def make_changes_folder(path: str) -> None:
    for name in CHANGES:
        os.makedirs(f"{path}/{name}", mode=0o755, exist_ok=True)


def _copy_once(source: str, target: str) -> None:
    """A copy that is kept on the host is made by the first session only: it has that one's changes."""
    if not os.path.exists(f"{target}.copied"):
        copy_tree.empty_tree(target)  # of a session that was killed while it copied
        copy_tree.copy_tree(source, target)
        mark_copied(target)


def mark_copied(target: str) -> None:
    os.close(os.open(f"{target}.copied", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def mount_home(spec: SandboxSpec, hidden: str) -> None:
    """An overlay over the folder that the home begins with, or the writable folder itself."""
    changes = changes_folder(spec)
    if not spec.has_home_source or "overlay" not in spec.parts:
        bind(f"{hidden}/{changes}/home", spec.home, HARMLESS)
        return
    # By its descriptor: the path of a fork's folder does not lead to it any more.
    before = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir(hidden)
        overlay(HOME_LOWER, f"{changes}/home", f"{changes}/home-work", spec.home)
        os.fchdir(before)
    finally:
        os.close(before)


def is_in(path: str, folder: str) -> bool:
    """Whether a path is that folder, or something in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def readonly_folders(spec: SandboxSpec) -> list[str]:
    """The folders to mount at their own paths, without those that are inside others or in the system."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in spec.readonly}, key=len):
        if not any(is_in(path, upper) for upper in ("/usr", *kept)):
            kept.append(path)
    return kept


def mask_proc(unmasked: str, target: str, null: str) -> None:
    """Mount a /proc at `target` whose dangerous parts are read-only or empty."""
    bind(unmasked, target, HARMLESS | syscalls.MOUNT_ATTR_NOEXEC)
    for name in PROC_READ_ONLY:
        if os.path.exists(f"{target}/{name}"):
            bind(f"{unmasked}/{name}", f"{target}/{name}", READ_ONLY | syscalls.MOUNT_ATTR_NOEXEC)
    for name in PROC_EMPTY_FILES:
        if _is_readable(f"{target}/{name}"):
            bind(null, f"{target}/{name}", syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID)
    for name in PROC_EMPTY_FOLDERS:
        if os.path.isdir(f"{target}/{name}"):
            tmpfs(f"{target}/{name}", size=4096, files=2, mode="555", flags=syscalls.MS_RDONLY)


def _is_readable(path: str) -> bool:
    """Only the host's root can read many of them, which no session is: each mount less saves time."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    return bool(status.st_mode & 0o004) or status.st_uid == os.getuid()


# --- mounts ----------------------------------------------------------------------------------------------------------

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


# --- files of the host ------------------------------------------------------------------------------------------------


def cache_host_files() -> None:
    """Read once, in the zygote, what every session needs of the host."""
    existing((*ETC_BOUND, *MACHINE_FACTS))
    _etc_copies()


@functools.cache
def existing(paths: tuple[str, ...]) -> list[str]:
    """The paths that exist on this host; looked up once, by the zygote."""
    return [path for path in paths if os.path.exists(path)]


def host_files_state() -> list[tuple[int, ...]]:
    """Identity and age of the host's files that a root is built from; an update replaces one, or changes a copied
    one."""
    system = ("/usr", *(f"/{name}" for name in MERGED), *ETC_BOUND, *MACHINE_FACTS)
    return [_state(path) for path in (*system, *_ETC_OF_NETWORK)]


def _state(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    changed = 0 if stat.S_ISDIR(status.st_mode) else status.st_ctime_ns
    return status.st_dev, status.st_ino, changed


@functools.cache
def _etc_copies() -> dict[str, bytes]:
    """Read once, by the zygote."""
    found = {path: _read(path) for path in ETC_COPIED}
    return {path: content for path, content in found.items() if content}


def _etc_files(uid: int, home: str, hostname: str, network: bool) -> dict[str, str]:
    """The files of /etc that are written for a session: content by path."""
    files = {
        "/etc/passwd": (
            "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n"
            f"agent:x:{uid}:{uid}:agent:{home}:/bin/sh\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ),
        "/etc/group": f"root:x:0:\nagent:x:{uid}:\nnogroup:x:65534:\n",
        "/etc/hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost\n",
        "/etc/hostname": f"{hostname}\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
        "/etc/shells": "/bin/sh\n",
    }
    if network:
        files["/etc/resolv.conf"] = _read("/etc/resolv.conf").decode("utf-8", errors="replace")
        files["/etc/hosts"] += _names_of_hosts_file()
    return files


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_ETC_FILE)
    except OSError:
        return b""


def _names_of_hosts_file() -> str:
    """The host's own entries of /etc/hosts, which are part of its network."""
    lines = _read("/etc/hosts").decode("utf-8", errors="replace").splitlines()
    return "".join(f"{line}\n" for line in lines if line.split("#")[0].split()[1:] and "localhost" not in line)


def _write_etc(root: str, files: dict[str, str]) -> None:
    os.makedirs(root + "/etc/ssl", mode=0o755, exist_ok=True)
    encoded = {path: content.encode() for path, content in files.items()}
    for path, content in {**_etc_copies(), **encoded}.items():
        descriptor = os.open(root + path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(descriptor, content)
        os.close(descriptor)
