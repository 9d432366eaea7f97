"""Sizes of what pageable memory is staged through."""

from __future__ import annotations

from dataclasses import dataclass

# Each thread fills a piece of its own. Copies of 16 MiB and more have the link's peak; a thread takes 2 to 3 ms for 32.
_PIECE_BYTES = 32 << 20
_MOST_PIECES = 12
# Of a small layer a piece is so much, that several threads work on it.
_PIECES_OF_A_LAYER = 4
# One piece is filled while the other is on the link.
FEWEST_PIECES = 2
MOST_THREADS = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class RingShape:
    """Size of a staging ring: `num_pieces` of `piece_bytes` each."""

    piece_bytes: int
    num_pieces: int

    @property
    def nbytes(self) -> int:
        """Page-locked memory of the ring."""
        return self.piece_bytes * self.num_pieces


def ring_shape(layer_bytes: int, available_bytes: int | None = None) -> RingShape:
    """The ring for layers of `layer_bytes`, within `available_bytes` of page-locked memory or, at least, two pieces."""
    share = -(-layer_bytes // _PIECES_OF_A_LAYER)
    piece_bytes = min(_PIECE_BYTES, -(-share // _PAGE_BYTES) * _PAGE_BYTES)
    fitting = _MOST_PIECES if available_bytes is None else available_bytes // piece_bytes
    return RingShape(piece_bytes, max(FEWEST_PIECES, min(_MOST_PIECES, fitting)))


def staging_threads(usable_cores: int) -> int:
    """Threads that fill the ring: half of the cores, the others launch, copy and wait."""
    return max(1, min(MOST_THREADS, usable_cores // 2))
