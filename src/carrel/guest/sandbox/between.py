"""A fork through a process in between that lives in the parent's own memory, so that this is copied once and not twice.

A process enters a pid namespace only by its children, and a user namespace for good: who wants a child in another
place needs somebody between, who enters and forks. That one is made here as vfork makes one: the parent stands still,
and its memory and descriptors are used by a process that differs in who it is and where. It calls one function of
Python; its child comes back out of that function with a copy of everything, as after any fork, and it itself ends.
What code has to do with a fork (hooks, signals, what is collected) is not for it: that is the parent's, or the child's.

Only machine code can do that. The one between must not return to where its parent has yet to return from; and where it
has not come back from the function, the parent must not go on: Python is in the middle of something.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import mmap
import os
import signal
from collections.abc import Callable, Iterator

from . import syscalls
from .numbers import MACHINE

BROKEN = 70
"""How the parent ends when the one between did not come back: its memory is not to be trusted."""

# long through(void (*function)(void), int *child): 0 in the child, the number of who was between in the parent, or an
# error below 0. The child is who has written something there: what ctypes returns for a function that raises, or that
# cannot be called (too deep a recursion), is whatever there was.
THROUGH = {
    "x86_64": """
        53              push %rbx
        6a00            push $0                 # whether the function has come back
        56              push %rsi               # where the child says that it is one
        4889fb          mov %rdi, %rbx
        bf00450000      mov $0x4500, %edi       # CLONE_VM, CLONE_VFORK, CLONE_FILES; no signal at its end
        31f6            xor %esi, %esi
        31d2            xor %edx, %edx
        4531d2          xor %r10d, %r10d
        4531c0          xor %r8d, %r8d
        b838000000      mov $56, %eax           # clone
        0f05            syscall
        4885c0          test %rax, %rax
        7410            jz 1f
        7825            js 2f
        837c240800      cmpl $0, 8(%rsp)        # in the parent
        751e            jne 2f
        bf46000000      mov $70, %edi           # BROKEN
        eb1d            jmp 3f
        ffd3        1:  call *%rbx              # in the one between
        c744240801000000 movl $1, 8(%rsp)
        488b0424        mov (%rsp), %rax
        31ff            xor %edi, %edi
        833800          cmpl $0, (%rax)
        7408            je 3f
        31c0            xor %eax, %eax          # in the child
        4883c410    2:  add $16, %rsp
        5b              pop %rbx
        c3              ret
        b8e7000000  3:  mov $231, %eax          # exit_group
        0f05            syscall
        f4              hlt
    """,
    "aarch64": """
        fd7bbda9        stp x29, x30, [sp, #-48]!
        ff4f01a9        stp xzr, x19, [sp, #16] // whether the function has come back
        e11300f9        str x1, [sp, #32]       // where the child says that it is one
        f30300aa        mov x19, x0
        00a088d2        mov x0, #0x4500         // CLONE_VM, CLONE_VFORK, CLONE_FILES; no signal at its end
        010080d2        mov x1, #0
        020080d2        mov x2, #0
        030080d2        mov x3, #0
        040080d2        mov x4, #0
        881b80d2        mov x8, #220            // clone
        010000d4        svc #0
        c00000b4        cbz x0, 1f
        8001f8b7        tbnz x0, #63, 2f
        e10b40f9        ldr x1, [sp, #16]       // in the parent
        410100b5        cbnz x1, 2f
        c00880d2        mov x0, #70             // BROKEN
        0b000014        b 3f
        60023fd6    1:  blr x19                 // in the one between
        210080d2        mov x1, #1
        e10b00f9        str x1, [sp, #16]
        e11340f9        ldr x1, [sp, #32]
        210040b9        ldr w1, [x1]
        000080d2        mov x0, #0
        81000034        cbz w1, 3f
        f30f40f9    2:  ldr x19, [sp, #24]      // in the child
        fd7bc3a8        ldp x29, x30, [sp], #48
        c0035fd6        ret
        c80b80d2    3:  mov x8, #94             // exit_group
        010000d4        svc #0
        000020d4        brk #0
    """,
}
# char *thread(void): where the thread's own variables are.
THREAD = {
    "x86_64": """
        64488b042500000000 mov %fs:0, %rax
        c3              ret
    """,
    "aarch64": """
        40d03bd5        mrs x0, tpidr_el0
        c0035fd6        ret
    """,
}
RSEQ_SIGNATURE = {"x86_64": 0x53053053, "aarch64": 0xD428BC00}
_RSEQ_SIZE = 32

_Function = ctypes.PYFUNCTYPE(None)
_api = ctypes.pythonapi
_before, _in_parent, _in_child = _api.PyOS_BeforeFork, _api.PyOS_AfterFork_Parent, _api.PyOS_AfterFork_Child
_WALL = 0x40000000
"""Waits for a process that ends without a signal too."""


def code(listing: str) -> bytes:
    """The first word of each line."""
    return bytes.fromhex("".join(line.split()[0] for line in listing.splitlines() if line.strip()))


@functools.cache
def way() -> Between:
    """Made once, in the process that all sessions come from; OSError where memory cannot be made a program."""
    return Between()


class Between:
    """The page of code, and how it is called."""

    def __init__(self) -> None:
        through, thread = code(THROUGH[MACHINE]), code(THREAD[MACHINE])
        self._page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._page.write(through + thread)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        syscalls.call("mprotect", start, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
        # With the interpreter's lock held, which a forked child must come back with.
        self._through = ctypes.PYFUNCTYPE(ctypes.c_long, _Function, ctypes.c_void_p)(start)
        self._thread = ctypes.PYFUNCTYPE(ctypes.c_void_p)(start + len(through))
        # Made here as well: a session may be at the limit of its memory, or have none made a program any more.
        self._crossing = _Function(self._call)
        self._cross: Callable[[], bool] = bool
        self._child = ctypes.c_int()
        self._sequences = _offset_of_sequences()

    def fork(self, cross: Callable[[], bool]) -> int:
        """Like os.fork; OSError where nothing was made. `cross` is called by the one between, forks as it is, and says
        whether this is the child; what it changes besides is changed for the parent too."""
        dumpable = syscalls.prctl(syscalls.PR_GET_DUMPABLE)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        between: int = -errno.EINTR
        # Hooks are code of the session: what they do, to this process and to others, is done by the one they belong to.
        _before()
        try:
            with _uncollected():
                # A handler would run in the one between, for the parent.
                signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
                self._cross, self._child.value = cross, 0
                between = self._through(self._crossing, ctypes.addressof(self._child))
                if between == 0:
                    self._register_sequences()
                elif between > 0:
                    os.waitpid(between, _WALL)
                # Who enters another user namespace is made undumpable, and that belongs to the memory.
                syscalls.prctl(syscalls.PR_SET_DUMPABLE, dumpable)
        finally:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            finally:
                (_in_parent if between else _in_child)()
        if between < 0:
            raise OSError(-between, f"clone: {os.strerror(-between)}")
        return between

    def _call(self) -> None:
        if self._cross():
            self._child.value = 1

    def _register_sequences(self) -> None:
        """For restartable sequences: who borrows memory is not registered, nor is its child; libc believes it is."""
        if self._sequences is None:
            return
        # Code may have forbidden it to itself, with a filter of its own.
        with contextlib.suppress(OSError):
            syscalls.call("rseq", self._thread() + self._sequences, _RSEQ_SIZE, 0, RSEQ_SIGNATURE[MACHINE])


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What is collected is code of the session too: destructors, callbacks of weak references."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _offset_of_sequences() -> int | None:
    """From the thread's own variables to what libc has registered with the kernel; None where it has not."""
    try:
        size = ctypes.c_uint.in_dll(syscalls.libc, "__rseq_size").value
        return ctypes.c_ssize_t.in_dll(syscalls.libc, "__rseq_offset").value if size else None
    except ValueError:
        return None  # an older libc, or another
