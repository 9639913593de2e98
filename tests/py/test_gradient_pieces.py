"""Messages of gradients: their bytes and checksums, in whatever order their parts come."""

from __future__ import annotations

import random

import pytest
import torch
from lohan.layout._gradient_pieces import Draft, Part, Piece, Trailer, memory_of

# A part of another dtype, so that its place is aligned: two bytes of padding precede it.
PARTS = [
    Part(0, torch.bfloat16, 5, 3001, 0),
    Part(1, torch.float32, 0, 4096, 6004),
    Part(2, torch.float32, 7, 1, 22388),
    Part(3, torch.bfloat16, 0, 9, 22392),
]
PIECE = Piece(PARTS, 22410)
TRAILER = Trailer(3, 1, 4, 0, b"\x0f")


def values_of(part: Part, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(part.first + part.count, generator=generator).to(part.dtype)


def expect(buffer: torch.Tensor, values: dict[int, torch.Tensor]) -> None:
    """Check the parts and the checksum of a sealed message."""
    for part in PARTS:
        end = part.offset + part.count * part.dtype.itemsize
        found = buffer[part.offset : end].clone().view(part.dtype)
        if part.param not in values:
            assert not found.any()
            continue
        flat = values[part.param]
        assert torch.equal(found, flat[part.first : part.first + part.count])
    message = memory_of(PIECE, buffer)
    trailer, check = PIECE.trailer_of(message)
    assert trailer == TRAILER
    assert check == PIECE.checksum(message, trailer)


@pytest.mark.parametrize("seed", range(40))
def test_a_message_is_right_in_whatever_order_its_parts_come(seed: int) -> None:
    choose = random.Random(seed)
    buffer = torch.full((PIECE.message_bytes,), 0xA5, dtype=torch.uint8)
    draft = Draft(PIECE, buffer)
    order = list(PARTS)
    if seed > 0:
        choose.shuffle(order)
    values = {}
    for part in order:
        if choose.random() < 0.2:
            draft.clear(part)
            continue
        values[part.param] = values_of(part, seed)
        draft.put(part, values[part.param])
        if choose.random() < 0.2:  # a part may be put again, or be missing after all
            again = choose.choice([each for each in PARTS if each.param in values])
            values[again.param] = values_of(again, seed + 1000)
            draft.put(again, values[again.param])
    draft.seal(TRAILER)
    expect(buffer, values)


def test_a_part_may_come_from_values_that_are_not_contiguous() -> None:
    buffer = torch.zeros(PIECE.message_bytes, dtype=torch.uint8)
    draft = Draft(PIECE, buffer)
    values = {}
    for part in PARTS:
        values[part.param] = torch.full((1,), 1.5, dtype=part.dtype).expand(part.first + part.count)
        draft.put(part, values[part.param])
    draft.seal(TRAILER)
    expect(buffer, values)


def test_every_flipped_bit_changes_the_checksum_of_a_message() -> None:
    buffer = torch.zeros(PIECE.message_bytes, dtype=torch.uint8)
    draft = Draft(PIECE, buffer)
    for part in PARTS:
        draft.put(part, values_of(part, 1))
    draft.seal(TRAILER)
    message = memory_of(PIECE, buffer)
    for at in range(0, PIECE.message_bytes, 61):
        message[at] ^= 1 << at % 8
        trailer, check = PIECE.trailer_of(message)
        assert check != PIECE.checksum(message, trailer)
        message[at] ^= 1 << at % 8
