"""What is known of a GPU by its architecture: the limits that inductor, Triton and the choice of configurations plan for.

A machine with a card asks its driver. Here the numbers come from NVIDIA's table of compute capabilities (CUDA C++ Programming
Guide, appendix "Compute Capabilities") and, where cards of one capability differ, from the largest common card, which is named.
They decide how fast the code is, not whether it is right: a card with other numbers runs it too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

KIB = 1024
MIB = 1024 * KIB


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one architecture.

    Attributes
    ----------
    arch
        Such as ``sm_80``.
    name
        The card whose numbers these are.
    processors
        Streaming multiprocessors of the card.
    threads, blocks
        Resident threads and blocks, at most, of one multiprocessor.
    shared, shared_block
        Bytes of shared memory of one multiprocessor, and of one block at most.
    l2, memory
        Bytes of cache and of memory of the card.
    """

    arch: str
    name: str
    processors: int
    threads: int
    blocks: int
    shared: int
    shared_block: int
    l2: int
    memory: int

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        return capability(self.arch)


#: Registers of one multiprocessor and in one allocation of a warp: the same from 7.5 to 12.1.
REGISTERS = 65536
REGISTER_UNIT = 256
WARP = 32


def _card(arch: str, name: str, processors: int, threads: int, blocks: int, shared: int, l2: int, memory: int) -> Card:
    return Card(
        arch=arch,
        name=name,
        processors=processors,
        threads=threads,
        blocks=blocks,
        shared=shared * KIB,
        shared_block=(shared if arch == "sm_75" else shared - 1) * KIB,
        l2=l2 * MIB,
        memory=memory * KIB * MIB,
    )


CARDS = {
    card.arch: card
    for card in (
        _card("sm_75", "T4", 40, 1024, 16, 64, 4, 16),
        _card("sm_80", "A100", 108, 2048, 32, 164, 40, 80),
        _card("sm_86", "A40", 84, 1536, 16, 100, 6, 48),
        _card("sm_89", "L40", 142, 1536, 24, 100, 96, 48),
        _card("sm_90", "H100", 132, 2048, 32, 228, 50, 80),
        _card("sm_100", "B200", 148, 2048, 32, 228, 126, 180),
        _card("sm_120", "RTX PRO 6000 Blackwell", 188, 1536, 24, 100, 128, 96),
    )
}


def plain(arch: str) -> str:
    """*arch* without the letter of an architecture-specific variant: ``sm_90a`` is a card of ``sm_90``."""
    return re.sub(r"[af]$", "", arch)


def number(arch: str) -> int:
    """90 for ``sm_90`` and ``sm_90a``."""
    return int(plain(arch).removeprefix("sm_"))


def capability(arch: str) -> tuple[int, int]:
    """(9, 0) for ``sm_90``."""
    return divmod(number(arch), 10)


def known(archs: Sequence[str]) -> list[str]:
    """Those of *archs* that a card is known of."""
    return [arch for arch in archs if plain(arch) in CARDS]


def chosen(archs: Sequence[str]) -> list[Card]:
    """The cards of *archs*, each once, lowest first: code for the lowest runs on all."""
    return [CARDS[arch] for arch in sorted({plain(arch) for arch in archs}, key=number)]


def occupancy(card: Card, registers: int, shared: int, warps: int) -> float:
    """Share of the resident warps of *card* that blocks of *warps* warps can fill.

    Parameters
    ----------
    registers
        Of one thread.
    shared
        Bytes of one block.
    """
    per_warp = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    limits = [card.blocks, card.threads // (WARP * warps), REGISTERS // per_warp // warps]
    if shared:
        limits.append(card.shared // (shared + KIB))  # the driver keeps 1 KiB of each block for itself
    return min(limits) * warps * WARP / card.threads
