"""The file system of a live fork: the session's own in a copied mount namespace, with its writable parts copied.

Init's hidden folder is the working directory of the process that builds this, and of the fork's init afterwards.
"""

from __future__ import annotations

import os

from .. import syscalls
from . import copying, mounts, place
from .plan import Plan


class ForkImpossible(Exception):
    """A place that cannot be had twice; the message says why."""


def check(plan: Plan) -> None:
    if plan.workspace.source is not None and plan.workspace.mode == "rw":
        raise ForkImpossible(
            f"the workspace is the folder {plan.workspace.source} itself (mode rw), which there cannot be two of; "
            "use mode overlay to be able to fork"
        )


def begin(plan: Plan, folder: str, step: place.Step) -> None:
    """Called in the fork's first process, in its new namespaces: all that does not depend on when the fork is made."""
    step("make the fork's scratch space")
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    mounts.tmpfs(folder, size=1 << 20, files=1024, mode="700")
    mounts.tmpfs(folder + "/scratch", size=plan.limits.disk, files=plan.limits.files, mode="700")
    for name in place.WRITABLE:
        os.mkdir(f"{folder}/scratch/{name}", 0o755)
    for name in (place.LOWER, place.HOME_LOWER):
        if os.path.isdir(name):
            mounts.bind(name, f"{folder}/{name}", mounts.READ_ONLY)
    step("mount the fork's /proc")
    os.mkdir(folder + "/proc")
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("proc", folder + "/proc", "proc", flags)
    step("mask the fork's /proc")
    place.mask_proc(folder + "/proc", "/proc", "/dev/null")
    flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount("devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=0620")


def finish(plan: Plan, folder: str, step: place.Step) -> None:
    """The session's files as they are now; ends with `folder` as the working directory."""
    step("copy the session's files")
    for name in place.WRITABLE:
        if name not in ("work", "home-work"):
            copying.copy_tree(f"scratch/{name}", f"{folder}/scratch/{name}")
    if os.path.isdir("kept"):
        copying.copy_tree("kept/upper", f"{folder}/scratch/upper")
    os.chdir(folder)
    _show(plan, step)


def _show(plan: Plan, step: place.Step) -> None:
    """Put the copies over what they are copies of."""
    shown = {"/tmp": "tmp", "/var/tmp": "tmp", "/dev/shm": "shm"}
    covered = [*shown, plan.home, plan.workspace.at]
    given = [*place.readonly(plan), *(mount.at for mount in plan.mounts)]
    above = [(path, mounts.Tree(path)) for path in given if any(place.is_in(path, upper) for upper in covered)]
    step("mount the fork's home and /tmp")
    for target, name in shown.items():
        attributes = mounts.HARMLESS | (syscalls.MOUNT_ATTR_NOEXEC if name == "shm" else 0)
        mounts.bind(f"scratch/{name}", target, attributes)
    if plan.home != plan.workspace.at:
        place.show_home(plan, ".")
    step("mount the fork's workspace")
    if plan.workspace.source is None or plan.copied:
        mounts.bind("scratch/upper", plan.workspace.at, mounts.HARMLESS)
    elif plan.overlaid:
        mounts.overlay("lower", "scratch/upper", "scratch/work", plan.workspace.at)
    for path, tree in above:
        tree.attach(path, 0)
