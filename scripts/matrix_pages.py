"""Pages as they lie on the devices of an engine's ranks, put together and compared. Pure: numpy alone.

Pages are uint8 [pages][layers][heads][slab bytes], numbered over the whole model. A slab holds bfloat16 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matrix_worker import Bytes, Piece


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the whole model; `num_torn` slabs are not the same on all ranks that hold them."""

    slabs: Bytes
    num_torn: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How two sets of the same pages differ.

    Attributes:
        first_unequal: page, layer and head of the first slab that differs.
        share_equal: bytes that are equal, of all bytes.
        largest: largest distance of two values; infinite beside what is no number.
        most_values: values that differ in the slab with most of them.
    """

    num_slabs: int
    num_unequal: int
    first_unequal: tuple[int, int, int] | None
    share_equal: float
    largest: float
    most_values: int


def assemble(pieces: Sequence[Piece]) -> Pages:
    """Read the ranks' pieces and put them together.

    Raises:
        ValueError: a layer or head of a page is missing, ranks differ in how pages are shared out, or shapes do not
            fit what the pieces claim.
    """
    num_owners = pieces[0].num_owners
    if any(piece.num_owners != num_owners for piece in pieces):
        raise ValueError(f"ranks share pages out among {[piece.num_owners for piece in pieces]}: not all the same")
    contents = [np.load(piece.file) for piece in pieces]
    shape = (
        max(piece.owner + (len(slabs) - 1) * num_owners + 1 for piece, slabs in zip(pieces, contents, strict=True)),
        max(piece.first_layer + piece.num_layers for piece in pieces),
        max(piece.first_head + piece.num_heads for piece in pieces),
    )
    whole = np.zeros((*shape, contents[0].shape[3]), np.uint8)
    holders = np.zeros(shape, np.uint8)
    num_torn = 0
    for piece, slabs in zip(pieces, contents, strict=True):
        place = (
            slice(piece.owner, None, num_owners),
            slice(piece.first_layer, piece.first_layer + piece.num_layers),
            slice(piece.first_head, piece.first_head + piece.num_heads),
        )
        target = whole[place]
        if slabs.shape != target.shape:
            raise ValueError(f"{piece.file} has the shape {slabs.shape}, {target.shape} was expected")
        held = holders[place] > 0
        num_torn += int(np.count_nonzero((slabs != target).any(axis=-1) & held))
        np.copyto(target, slabs, where=~held[..., None])
        holders[place] += 1
    if not holders.all():
        raise ValueError(f"of {holders.size} units of pages, {np.count_nonzero(holders == 0)} are held by no rank")
    return Pages(whole, num_torn)


def compare(one: Bytes, other: Bytes) -> Difference:
    """Compare byte by byte.

    Raises:
        ValueError: they are not the same pages.
    """
    if one.shape != other.shape:
        raise ValueError(f"pages of shape {one.shape} cannot be compared with pages of shape {other.shape}")
    differs = one.view(np.uint16) != other.view(np.uint16)
    unequal = np.argwhere(differs.any(axis=-1))
    return Difference(
        num_slabs=int(np.prod(one.shape[:3])),
        num_unequal=len(unequal),
        first_unequal=(int(unequal[0][0]), int(unequal[0][1]), int(unequal[0][2])) if len(unequal) else None,
        share_equal=float(np.mean(one == other)) if one.size else 1.0,
        largest=_largest(one.view(np.uint16)[differs], other.view(np.uint16)[differs]),
        most_values=int(differs.sum(axis=-1).max(initial=0)),
    )


def _largest(one: npt.NDArray[np.uint16], other: npt.NDArray[np.uint16]) -> float:
    with np.errstate(invalid="ignore"):
        distances = np.abs(_values(one) - _values(other))
    return float(np.nan_to_num(distances, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _values(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """A bfloat16 value is the upper half of a float32 one."""
    return (halves.astype(np.uint32) << 16).view(np.float32)
