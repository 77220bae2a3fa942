"""Live forks: a copy of a running session, with the same variables and files, in namespaces of its own.

A worker has no capabilities and can create no namespaces, so its init and it make the fork together:

1. The host asks init (`fork`), then the worker. Init clones a second init, the fork's, into new namespaces below the
   session's own (`LiveForks.prepare`). That one builds the fork's root from the session's hidden folder, copies the
   files that were written, and reports (`fork_ready`).
2. The worker forks a middle process (`sandbox_fork`), which asks init to be let in (`enter`). When the fork is ready,
   init permits it one setns into a user namespace and sends it the descriptors of the fork's namespaces.
3. The middle process enters them, drops the capabilities that it got by that, forks into the pid namespace, tells init
   the child's number (`entered`) and exits. Init sends the host a pidfd of the child, which is the fork's worker.

From then on the fork's init speaks to the host. The fork outlives its parent session, but not the parent's init, which
therefore stays until its forks are closed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
from typing import Any, Protocol

from .. import processes, syscalls
from ..channel import Channel, ChannelError
from . import copy_tree, namespaces, root_fs
from .spec import SandboxSpec, StartReport, parse_report

# What a fork gets anew, in the order of entering: the user namespace gives the right to enter the others.
_NAMESPACES = {
    "user": syscalls.CLONE_NEWUSER,
    "mnt": syscalls.CLONE_NEWNS,
    "pid": syscalls.CLONE_NEWPID,
    "ipc": syscalls.CLONE_NEWIPC,
    "uts": syscalls.CLONE_NEWUTS,
    "net": syscalls.CLONE_NEWNET,
}
_ENOSPC, _EUSERS = 28, 87


# --- in the session's init --------------------------------------------------------------------------------------------


class WorkerLink:
    """Init's channel to one worker and to what is forked from it."""

    MAX_RECORD = 1 << 16

    def __init__(self, end: socket.socket, *, started_here: bool) -> None:
        end.setblocking(False)
        self.channel = Channel(end, self.MAX_RECORD)
        self.filter_is_ours = started_here
        """Whether the requests of its filter arrive here, or at the init further up that started its ancestor."""
        self.expects_listener = started_here


class ForkingInit(Protocol):
    """What a live fork needs of init."""

    spec: SandboxSpec
    poll: select.poll
    control: Channel | None

    def send(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """To the host."""

    def permit_setns(self, pidfd: int, *, here: bool) -> None:
        """Let one process into a user namespace, once."""

    def serve_fork(self, control: int, lifeline: int, parent: Channel, link: socket.socket) -> None:
        """In the first process of a fork: be its init; never returns."""


class ForkedSession:
    """A fork as the init of its parent session knows it."""

    def __init__(
        self, request: object, control: int, pid: int, folder: str, ends: _ForkPipes, namespace_fds: dict[str, int]
    ) -> None:
        self.request, self.pid, self.folder, self.namespaces = request, pid, folder, namespace_fds
        self.lifeline, self.report, self.worker_link = ends.lifeline_write, ends.report_read, ends.worker_end
        self.channel = Channel(ends.init_end)
        """To the fork's init, which asks for permission here for forks further down."""
        self.control: Channel | None = Channel(socket.socket(fileno=control))
        self.worker: int | None = None
        self.entry_permitted = False
        self.filter_is_ours = False

    def is_abandoned(self) -> bool:
        """Whether the host has closed its end."""
        if self.control is None:
            return False
        poll = select.poll()
        poll.register(self.control.fileno(), 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def send(self, record: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """To the host, unless it has closed this fork."""
        if self.control is not None:
            with contextlib.suppress(ChannelError, OSError):
                self.control.send(record, tuple(descriptors or ()))

    def close_control(self) -> None:
        if self.control is not None:
            self.control.close()
            self.control = None

    def close(self) -> None:
        """Its init has ended."""
        os.close(self.lifeline)
        self.close_control()
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)


class _ForkPipes:
    """The descriptors between an init and that of a fork, made before it is forked."""

    def __init__(self) -> None:
        self.lifeline_read, self.lifeline_write = os.pipe2(os.O_CLOEXEC)
        self.report_read, self.report_write = os.pipe2(os.O_CLOEXEC)
        self.init_end, self.parent_end = socket.socketpair()
        self.worker_end, self.link_end = socket.socketpair()

    def close_fork_ends(self) -> None:
        os.close(self.lifeline_read)
        os.close(self.report_write)
        self.parent_end.close()
        self.link_end.close()

    def close_own_ends(self) -> None:
        os.close(self.lifeline_write)
        os.close(self.report_read)
        self.init_end.close()
        self.worker_end.close()


class ForkImpossible(Exception):
    """This session cannot be forked; the message says why."""


class LiveForks:
    """The forks of one session: init's part."""

    def __init__(self, init: ForkingInit) -> None:
        self.init = init
        self.alive: dict[int, ForkedSession] = {}
        self.pending: ForkedSession | None = None
        """The fork that is being made, until its worker has entered."""
        self.waiting: tuple[WorkerLink, int] | None = None
        """The middle process that asked to enter before the fork was ready."""
        self._count = 0
        self._channels: dict[int, ForkedSession] = {}

    def prepare(self, request: object, descriptors: list[int], generation: str) -> None:
        """Start a fork's init; the host hears fork_ready or fork_failed.

        With a `generation` the fork's files are kept on the host, as those of the session, in a folder of this name."""
        try:
            if not self.init.spec.can_fork or len(descriptors) != 1:
                raise ForkImpossible("this sandbox does not have all that a live fork needs; see `carrel doctor`")
            if self.pending is not None and not self.pending.is_abandoned():
                raise ForkImpossible("another fork of this session is being made")
            self._give_up()
            _check(self.init.spec)
            self.pending = self._start(request, descriptors[0], generation)
        except ForkImpossible as refusal:
            self._failed(request, {"step": "check", "errno": None, "message": str(refusal)})
        except OSError as error:
            self._failed(request, {"step": "new namespaces", "errno": error.errno, "message": _explain(error)})

    def _failed(self, request: object, report: dict[str, Any]) -> None:
        self.init.send({"op": "fork_failed", "id": request, **report})

    def _start(self, request: object, control: int, generation: str) -> ForkedSession:
        self._count += 1
        folder = f"fork{self._count}"
        ends = _ForkPipes()
        spec = self.init.spec
        # The id maps of a process that is not dumpable belong to the host's root. Landlock keeps the worker from both.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        pid = 0
        try:
            pid = syscalls.fork_with_namespaces(namespaces.clone_flags(spec))
            if pid == 0:
                _run_fork(self.init, ends, control, folder, generation)
            namespaces.write_maps(pid, spec.uid, (spec.uid, spec.uid), 0 if namespaces.has_root() else None)
            namespace_fds = _open_namespaces(pid, namespaces.clone_flags(spec))
            fork = ForkedSession(request, os.dup(control), pid, folder, ends, namespace_fds)
        except OSError:
            ends.close_own_ends()  # by which the fork's init, if there is one, ends
            raise
        finally:
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
            ends.close_fork_ends()
        # If it has been killed already, its end is noticed soon.
        with contextlib.suppress(BrokenPipeError):
            os.write(fork.lifeline, b"g")
        self.alive[pid] = fork
        self._channels[fork.channel.fileno()] = fork
        self.init.poll.register(fork.report, select.POLLIN)
        self.init.poll.register(fork.channel.fileno(), select.POLLIN)
        return fork

    def handle(self, source: int) -> None:
        """A fork's init reports, or asks for permission on behalf of a fork further down."""
        fork = self.pending
        if fork is not None and source == fork.report:
            line = os.read(source, 65536)
            if not line:
                return  # it has ended, and is reaped soon
            self._close_report(fork)
            report = parse_report(line)
            if not report.get("ok"):
                self._failed(fork.request, report)
                self._give_up()
                return
            self.init.send({"op": "fork_ready", "id": fork.request})
            if self.waiting is not None:
                (link, pid), self.waiting = self.waiting, None
                with contextlib.suppress(ChannelError, OSError):
                    self._let_in(fork, link, pid)
        elif source in self._channels:
            self._relay(source, self._channels[source])

    def _relay(self, source: int, fork: ForkedSession) -> None:
        """Permit setns to a process whose filter asks this init, or the one above."""
        try:
            for _, descriptors in fork.channel.receive():
                for descriptor in descriptors:
                    self.init.permit_setns(descriptor, here=fork.filter_is_ours)
                    os.close(descriptor)
                fork.channel.send({"op": "permitted"})
        except (ChannelError, OSError):
            self.init.poll.unregister(source)
            del self._channels[source]
            fork.channel.close()

    def enter(self, worker: WorkerLink, pid: int) -> None:
        """A middle process asks to be let in, and waits until the fork is ready."""
        if self.pending is None:
            _refuse(worker, pid, "init was not asked to prepare a fork")
        elif self.pending.report < 0:
            self._let_in(self.pending, worker, pid)
        else:
            self.waiting = worker, pid

    def _let_in(self, fork: ForkedSession, worker: WorkerLink, pid: int) -> None:
        try:
            descriptor = syscalls.pidfd_open(pid)
        except OSError:
            _refuse(worker, pid, "the child is gone")
            return
        fork.filter_is_ours = worker.filter_is_ours
        self.init.permit_setns(descriptor, here=worker.filter_is_ours)
        os.close(descriptor)
        flags = [_NAMESPACES[name] for name in fork.namespaces]
        descriptors = (fork.worker_link.fileno(), *fork.namespaces.values())
        worker.channel.send({"op": "entering", "pid": pid, "flags": flags}, descriptors)
        fork.entry_permitted = True

    def entered(self, pid: int) -> None:
        """A child is in the fork, and is its worker. A message about an earlier fork, which has ended, is ignored."""
        fork = self.pending
        if fork is None or not fork.entry_permitted:
            return
        try:
            descriptor = syscalls.pidfd_open(pid)
        except OSError:
            return  # dead already, as the fork's own init will report
        fork.worker = pid
        fork.send({"op": "worker", "pid": pid}, [descriptor])
        os.close(descriptor)
        self._settle()

    def _give_up(self) -> None:
        if self.pending is not None and self.pending.pid in self.alive:
            os.kill(self.pending.pid, signal.SIGKILL)
        self._settle()

    def _settle(self) -> None:
        """The pending fork is complete, or has failed: no process may enter it any more."""
        if self.waiting is not None:
            (link, pid), self.waiting = self.waiting, None
            with contextlib.suppress(ChannelError, OSError):
                _refuse(link, pid, "the fork could not be prepared")
        fork, self.pending = self.pending, None
        if fork is not None:
            for descriptor in fork.namespaces.values():
                os.close(descriptor)
            fork.namespaces = {}
            fork.worker_link.close()
            self._close_report(fork)

    def _close_report(self, fork: ForkedSession) -> None:
        if fork.report >= 0:
            self.init.poll.unregister(fork.report)
            os.close(fork.report)
            fork.report = -1

    def reaped(self, pid: int, status: int) -> None:
        """A child of init has ended: perhaps a fork's worker, which is ours to reap, or a fork's init."""
        for fork in self.alive.values():
            if fork.worker == pid:
                fork.worker = None
                fork.send({"op": "exited", "pid": pid, "status": status})
                # From here on only the fork's own init speaks to the host, which sees by its end that it is closed.
                fork.close_control()
        ended = self.alive.pop(pid, None)
        if ended is None:
            return
        if ended is self.pending:
            if ended.report >= 0:
                self._failed(ended.request, parse_report(b""))
            self._settle()
        ended.close()
        if not self.alive and self.init.control is None:
            os._exit(0)


def _refuse(worker: WorkerLink, pid: int, message: str) -> None:
    worker.channel.send({"op": "refused", "pid": pid, "message": message})


def _open_namespaces(pid: int, flags: int) -> dict[str, int]:
    """The new namespaces of a process, in the order of entering."""
    found: dict[str, int] = {}
    try:
        for name, flag in _NAMESPACES.items():
            if flag & flags:
                found[name] = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        for descriptor in found.values():
            os.close(descriptor)
        raise
    return found


def _explain(error: OSError) -> str:
    if error.errno in (_ENOSPC, _EUSERS):
        return (
            f"{error}: forks of forks go about 30 deep, and the machine has a limit on namespaces; a checkpoint that "
            "was made after a rewind is two deeper, and an older one can still be rewound to"
        )
    return str(error)


# --- in the fork's init -----------------------------------------------------------------------------------------------


def _run_fork(parent: ForkingInit, ends: _ForkPipes, control: int, folder: str, generation: str) -> None:
    """The whole life of the fork's init; never returns."""
    report = StartReport(ends.report_write)
    try:
        processes.reset_signals()
        kept = {ends.lifeline_read, ends.report_write, ends.link_end.fileno(), ends.parent_end.fileno(), control}
        processes.close_others(kept)
        if os.read(ends.lifeline_read, 1) != b"g":
            os._exit(1)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        spec = parent.spec
        if "uts" in spec.parts:
            syscalls.sethostname(spec.hostname)
        if "net" in spec.parts and not spec.network:
            namespaces.start_loopback()
        _build_root(spec, folder, generation, report.step)
        gc.freeze()
        report.succeeded()
        parent.serve_fork(control, ends.lifeline_read, Channel(ends.parent_end), ends.link_end)
    except BaseException as error:  # noqa: BLE001 -- reported to the init above, which tells the host
        report.failed(error)
    finally:
        os._exit(1)  # Otherwise it would continue as the init that it was forked from.


def _check(spec: SandboxSpec) -> None:
    if spec.workspace.source is not None and spec.workspace.mode == "rw":
        raise ForkImpossible(
            f"the workspace is the folder {spec.workspace.source} itself (mode rw), of which there cannot be two; "
            "use mode overlay to be able to fork"
        )


def _build_root(spec: SandboxSpec, folder: str, generation: str, step: root_fs.Step) -> None:
    """The session's file system in a copied mount namespace, with its writable parts copied into `folder`, which is
    the working directory afterwards. Until then it is the hidden folder of the session's init."""
    step("create the fork's scratch space")
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    root_fs.tmpfs(folder, size=1 << 20, files=1024, mode="700")
    root_fs.tmpfs(folder + "/scratch", size=spec.limits.disk, files=spec.limits.files, mode="700")
    for name in root_fs.WRITABLE:
        os.mkdir(f"{folder}/scratch/{name}", 0o755)
    for name in (root_fs.LOWER, root_fs.HOME_LOWER):
        if os.path.isdir(name):
            root_fs.bind(name, f"{folder}/{name}", root_fs.READ_ONLY)
    step("mount the fork's /proc")
    os.mkdir(folder + "/proc")
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("proc", folder + "/proc", "proc", flags)
    step("mask the fork's /proc")
    root_fs.mask_proc(folder + "/proc", "/proc", "/dev/null")
    flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount("devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=0620")
    step("copy the session's files")
    if os.path.isdir(root_fs.KEPT):
        root_fs.bind(root_fs.KEPT, f"{folder}/{root_fs.KEPT}", root_fs.HARMLESS)
    before, spec.workspace.generation = root_fs.changes_folder(spec), generation
    now = f"{folder}/{root_fs.changes_folder(spec)}"
    if generation:
        root_fs.make_changes_folder(now)
    for name in root_fs.WRITABLE:
        if name in ("upper", "home"):
            copy_tree.copy_tree(f"{before}/{name}", f"{now}/{name}")
            root_fs.mark_copied(f"{now}/{name}")
        elif name not in ("work", "home-work"):
            copy_tree.copy_tree(f"scratch/{name}", f"{folder}/scratch/{name}")
    os.chdir(folder)
    _mount_copies(spec, step)


def _mount_copies(spec: SandboxSpec, step: root_fs.Step) -> None:
    """Mount the copies over the folders that they are copies of, and what was mounted inside of those again."""
    targets = {"/tmp": "tmp", "/var/tmp": "tmp", "/dev/shm": "shm"}
    covered = [*targets, spec.home, spec.workspace.at]
    given = [*root_fs.readonly_folders(spec), *(mount.at for mount in spec.mounts)]
    inside = [(path, root_fs.MountTree(path)) for path in given if any(root_fs.is_in(path, upper) for upper in covered)]
    step("mount the fork's home and /tmp")
    for target, name in targets.items():
        attributes = root_fs.HARMLESS | (syscalls.MOUNT_ATTR_NOEXEC if name == "shm" else 0)
        root_fs.bind(f"scratch/{name}", target, attributes)
    if spec.home != spec.workspace.at:
        root_fs.mount_home(spec, ".")
    step("mount the fork's workspace")
    changes = root_fs.changes_folder(spec)
    if spec.workspace.source is None or spec.workspace_is_copy:
        root_fs.bind(f"{changes}/upper", spec.workspace.at, root_fs.HARMLESS)
    elif spec.workspace_is_overlay:
        root_fs.overlay("lower", f"{changes}/upper", f"{changes}/work", spec.workspace.at)
    for path, tree in inside:
        tree.attach(path, 0)
