"""A small assembler for the programs that seccomp runs on every system call."""

from __future__ import annotations

import struct

# Offsets in struct seccomp_data; the low half of a 64-bit argument comes first on both machines we know.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16

ALLOW = 0x7FFF0000
KILL = 0x80000000
NOTIFY = 0x7FC00000
PRETEND = 0x00050000
"""The call is not made, and gives 0."""


def refuse(errno: int) -> int:
    return 0x00050000 | errno


Instruction = "tuple[int, int, int, int]"


class Program:
    """Instructions in order; every test falls through to the next instruction or skips what was written inside it."""

    def __init__(self) -> None:
        self.instructions: list[tuple[int, int, int, int]] = []

    def load(self, offset: int) -> None:
        self.instructions.append((0x20, 0, 0, offset))

    def load_argument(self, index: int, *, high: bool = False) -> None:
        self.load(ARGUMENTS + 8 * index + (4 if high else 0))

    def mask(self, bits: int) -> None:
        self.instructions.append((0x54, 0, 0, bits))

    def give(self, action: int) -> None:
        self.instructions.append((0x06, 0, 0, action))

    def follow(self, other: Program) -> None:
        self.instructions += other.instructions

    def if_equal(self, value: int, inside: Program) -> None:
        """Run `inside` when the loaded word equals the value, else skip it."""
        self._branch(0x15, value, inside, negated=False)

    def unless_equal(self, value: int, inside: Program) -> None:
        self._branch(0x15, value, inside, negated=True)

    def if_at_least(self, value: int, inside: Program) -> None:
        self._branch(0x35, value, inside, negated=False)

    def if_any_bit(self, bits: int, inside: Program) -> None:
        self._branch(0x45, bits, inside, negated=False)

    def _branch(self, code: int, value: int, inside: Program, *, negated: bool) -> None:
        length = len(inside.instructions)
        if length > 255:
            raise ValueError(f"a branch of {length} instructions; at most 255 can be skipped")
        self.instructions.append((code, length, 0, value) if negated else (code, 0, length, value))
        self.instructions += inside.instructions

    def assemble(self) -> bytes:
        """As struct sock_filter; the kernel takes at most 4096 of them."""
        return b"".join(struct.pack("HBBI", *instruction) for instruction in self.instructions)


def giving(action: int) -> Program:
    program = Program()
    program.give(action)
    return program
