"""Limits of a session as a whole, by cgroup v2 or v1: groups below our own, where we may make them."""

from __future__ import annotations

import errno
import os

from .plan import Limits

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000
LEAST_QUOTA = 1_000


class Tree:
    """One hierarchy of the machine, at the folder where our own group is."""

    def __init__(self, folder: str, version: int) -> None:
        self.folder, self.version = folder, version


def trees() -> dict[str, Tree]:
    """For each controller the folder below which a group for it can be made; without those where it cannot."""
    own = _own_paths()
    found: dict[str, Tree] = {}
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
                found[name] = Tree(folder, 2 if kind == "cgroup2" else 1)
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
    """Controllers that a child group would have; switched on here where the kernel lets us.

    It does not where processes are in the group itself, as ours is: then somebody must have delegated it.
    """
    try:
        with open(folder + "/cgroup.controllers", encoding="ascii") as file:
            there = set(file.read().split())
        for name in there & set(CONTROLLERS):
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


def settings(limits: Limits, version: int) -> dict[str, dict[str, str]]:
    """For each controller the files to write; the first of a controller must succeed, the others may be missing."""
    wanted: dict[str, dict[str, str]] = {}
    if limits.memory is not None:
        amount = str(limits.memory)
        if version == 2:
            wanted["memory"] = {"memory.max": amount, "memory.swap.max": "0"}
        else:
            wanted["memory"] = {"memory.limit_in_bytes": amount, "memory.memsw.limit_in_bytes": amount}
    if limits.processes is not None:
        # Init, the worker that is being replaced and the place of the next fork are in the group too.
        wanted["pids"] = {"pids.max": str(limits.processes + 3)}
    if limits.cpus is not None:
        quota = max(int(limits.cpus * PERIOD), LEAST_QUOTA)
        if version == 2:
            wanted["cpu"] = {"cpu.max": f"{quota} {PERIOD}"}
        else:
            wanted["cpu"] = {"cpu.cfs_quota_us": str(quota), "cpu.cfs_period_us": str(PERIOD)}
    return wanted


class Group:
    """The groups of one session: one folder in each hierarchy."""

    def __init__(self, name: str, limits: Limits, where: dict[str, Tree]) -> None:
        self.folders: list[str] = []
        self.doors: list[int] = []
        self.controllers: set[str] = set()
        try:
            for controller, tree in where.items():
                files = settings(limits, tree.version).get(controller)
                if files is not None:
                    self._make(f"{tree.folder}/{name}", files)
                    self.controllers.add(controller)
            for folder in self.folders:
                self.doors.append(os.open(folder + "/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
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
        """In the process itself: the kernel may take its time, in which the zygote has other things to do."""
        for door in self.doors:
            os.write(door, b"0")
        self.close()

    def close(self) -> None:
        """The doors; who is in stays in."""
        for door in self.doors:
            os.close(door)
        self.doors = []

    def remove(self) -> bool:
        """False while something is still dying in there; to be tried again."""
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
    """When a process began, in the kernel's ticks: a number may be given twice, this pair not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def sweep(where: dict[str, Tree]) -> None:
    """Remove the groups of zygotes that were killed before they could."""
    for folder in {tree.folder for tree in where.values()}:
        for name in os.listdir(folder):
            words = name.split("-")
            if len(words) == 4 and words[0] == "carrel" and words[1].isdigit() and _started(int(words[1])) != words[2]:
                try:
                    os.rmdir(f"{folder}/{name}")
                except OSError as error:
                    if error.errno not in (errno.EBUSY, errno.ENOENT, errno.EACCES, errno.EPERM):
                        raise
