"""Limits of a session as a whole, by cgroup v2 or v1: groups below our own, where we may create them."""

from __future__ import annotations

import errno
import os

from .spec import SandboxLimits

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000
LEAST_QUOTA = 1_000


class Hierarchy:
    """One cgroup hierarchy of the machine, at the folder of our own group."""

    def __init__(self, folder: str, version: int) -> None:
        self.folder, self.version = folder, version


def hierarchies() -> dict[str, Hierarchy]:
    """By controller, the hierarchy in which a group for it can be created; without those where it cannot."""
    own = _own_paths()
    found: dict[str, Hierarchy] = {}
    for point, root, kind, options in _cgroup_mounts():
        names = CONTROLLERS if kind == "cgroup2" else tuple(set(options.split(",")) & set(CONTROLLERS))
        for name in names:
            path = own.get("" if kind == "cgroup2" else name)
            if path is None or name in found:
                continue
            inside = path[len(root) :] if root != "/" and path.startswith(root) else path
            folder = os.path.normpath(point + "/" + inside)
            if not os.access(folder, os.W_OK):
                continue
            if kind == "cgroup" or name in _enabled(folder):
                found[name] = Hierarchy(folder, 2 if kind == "cgroup2" else 1)
    return found


def _own_paths() -> dict[str, str]:
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split(":", 2) for line in file]
    return {name: path for _, names, path in rows for name in names.split(",")}


def _cgroup_mounts() -> list[tuple[str, str, str, str]]:
    """Mount point, root of the mount, kind and options of every cgroup file system."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            fields, (kind, _, options) = left.split(), right.split()[:3]
            if kind in ("cgroup", "cgroup2"):
                found.append((fields[4], fields[3], kind, options))
    return found


def _enabled(folder: str) -> set[str]:
    """Controllers that a child group would have; switched on here where the kernel allows it.

    It does not where processes are in the group itself, as ours is: then the system must have delegated it.
    """
    try:
        with open(folder + "/cgroup.controllers", encoding="ascii") as file:
            available = set(file.read().split())
        for name in available & set(CONTROLLERS):
            try:
                _write(folder + "/cgroup.subtree_control", f"+{name}")
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP):
                    raise
        with open(folder + "/cgroup.subtree_control", encoding="ascii") as file:
            return set(file.read().split())
    except FileNotFoundError:
        return set()


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def settings(limits: SandboxLimits, version: int) -> dict[str, dict[str, str]]:
    """For each controller the files to write; the first of a controller must succeed, the others may be missing."""
    wanted: dict[str, dict[str, str]] = {}
    if limits.memory is not None:
        amount = str(limits.memory)
        if version == 2:
            wanted["memory"] = {"memory.max": amount, "memory.swap.max": "0"}
        else:
            wanted["memory"] = {"memory.limit_in_bytes": amount, "memory.memsw.limit_in_bytes": amount}
    if limits.processes is not None:
        # Init and the worker that is being replaced are in the group too.
        wanted["pids"] = {"pids.max": str(limits.processes + 2)}
    if limits.cpus is not None:
        quota = max(int(limits.cpus * PERIOD), LEAST_QUOTA)
        if version == 2:
            wanted["cpu"] = {"cpu.max": f"{quota} {PERIOD}"}
        else:
            wanted["cpu"] = {"cpu.cfs_quota_us": str(quota), "cpu.cfs_period_us": str(PERIOD)}
    return wanted


class CgroupSet:
    """The cgroups of one session: one folder in each hierarchy."""

    def __init__(self, name: str, limits: SandboxLimits, in_hierarchies: dict[str, Hierarchy]) -> None:
        self.folders: list[str] = []
        self.descriptors: list[int] = []
        self.controllers: set[str] = set()
        try:
            for controller, hierarchy in in_hierarchies.items():
                files = settings(limits, hierarchy.version).get(controller)
                if files is not None:
                    self._make(f"{hierarchy.folder}/{name}", files)
                    self.controllers.add(controller)
            for folder in self.folders:
                self.descriptors.append(os.open(folder + "/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
            self.remove()
            raise

    def _make(self, folder: str, files: dict[str, str]) -> None:
        if folder not in self.folders:
            os.mkdir(folder)
            self.folders.append(folder)
        for number, (name, value) in enumerate(files.items()):
            if number == 0 or os.path.exists(f"{folder}/{name}"):
                _write(f"{folder}/{name}", value)

    def enter(self) -> None:
        """Called by the process itself: the kernel may take its time, and the zygote does not wait."""
        for descriptor in self.descriptors:
            os.write(descriptor, b"0")
        self.close()

    def close(self) -> None:
        """Close the descriptors; the processes stay in the groups."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def remove(self) -> bool:
        """False while a process is still dying in there; then try again later."""
        for folder in list(self.folders):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                continue
            self.folders.remove(folder)
        return not self.folders


def name_for(number: int) -> str:
    return f"carrel-{os.getpid()}-{_started(os.getpid())}-{number}"


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks: process numbers are reused, the pair is unique."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def remove_old_groups(in_hierarchies: dict[str, Hierarchy]) -> None:
    """Remove the groups of zygotes that were killed before they could."""
    for folder in {hierarchy.folder for hierarchy in in_hierarchies.values()}:
        for name in os.listdir(folder):
            words = name.split("-")
            if len(words) == 4 and words[0] == "carrel" and words[1].isdigit() and _started(int(words[1])) != words[2]:
                try:
                    os.rmdir(f"{folder}/{name}")
                except OSError as error:
                    if error.errno not in (errno.EBUSY, errno.ENOENT, errno.EACCES, errno.EPERM):
                        raise
