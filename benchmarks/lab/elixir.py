"""The search of Elixir's authors: the size of chunks, moves of chunks, and what the GPU holds.

Parameters are packed in order of use into chunks of one size. Gathered chunks are in blocks of GPU
memory (the rCache), which Belady's rule evicts. Each further byte of GPU memory goes either to one
more block or to the states of chunks, which the GPU then updates itself.

Sizes are numbers of elements, as in the authors' code, whose results these functions reproduce.

Source: Elixir IV-A, VI-A, and elixir/search and src/simulator.cpp of github.com/hpcaitech/Elixir
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

_MIB = 1 << 20
_GIB = 1 << 30
_RANGE_BYTES_MIN = 32 * _MIB
_RANGE_FACTOR = 3
_INTERVAL_MIN = 1024
_WORK_MAX = 16 * _MIB
# Blocks that are always there, and two more if chunks are prefetched.
_BLOCKS_MIN = 4
_BLOCKS_AHEAD = 2
# What the GPU's memory is multiplied with, what the driver takes, and how much more activations
# take than was counted.
_ROOM_FACTOR = 0.95
_DRIVER_BYTES = 2 * _GIB
_ACTIVATION_FACTOR = 1.25
# fp16 and Adam: the sizes of an element of the parameters and of the master, and how many elements
# of 16 bits parameter and states take together.
PARAM_BYTES = 2
MASTER_BYTES = 4
STATES_FACTOR = 7


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below size."""
    return size + -size % multiple


def search_range(numels: Sequence[int], element_bytes: int) -> tuple[int, int, int]:
    """Return the least and the largest chunk to try, and the interval between two sizes.

    The least is 32 MiB, doubled until it holds the largest parameter; the largest is 3 times that.

    Args:
        numels: the sizes of the parameters.
        element_bytes: the bytes of an element.
    """
    largest = max(numels) * element_bytes
    least = _RANGE_BYTES_MIN
    while least < largest:
        least *= 2
    most = _RANGE_FACTOR * least
    rounded = 1 << (len(numels) - 1).bit_length()
    tries = _WORK_MAX // (2 * rounded)
    gap = most - least
    interval = _INTERVAL_MIN if tries > gap // _INTERVAL_MIN else gap // tries
    return least // element_bytes, most // element_bytes, interval // element_bytes


def pack(numels: Sequence[int], chunk: int) -> tuple[list[int], int]:
    """Pack parameters into chunks; return the chunk of each, and how many elements are wasted."""
    chunks: list[int] = []
    count = left = waste = 0
    for numel in numels:
        if numel > left:
            waste += left
            count += 1
            left = chunk
        left -= numel
        chunks.append(count - 1)
    return chunks, waste + left


def least_waste(
    groups: Sequence[Sequence[int]], least: int, most: int, interval: int
) -> tuple[int, int]:
    """Return the smallest chunk that wastes least, and how much. Source: Elixir IV-A.

    Args:
        groups: the sizes of the parameters of each group that is packed by itself.
        least: the least chunk to try.
        most: the largest one.
        interval: what all sizes are a multiple of.
    """
    first = round_up(max(least, *(max(numels) for numels in groups)), interval)
    sizes = range(first, most + 1, interval)
    found = [(sum(pack(numels, size)[1] for numels in groups), size) for size in sizes]
    waste, size = min(found)
    return size, waste


def move_count(steps: Sequence[Sequence[int]], block_count: int) -> int:
    """Count the moves of chunks to and from a cache that Belady's rule evicts.

    Each eviction, and each chunk that is in the cache at the end, counts twice: it was loaded, and
    it is or will be moved out. Of chunks that are used again equally late, the one with the larger
    index is evicted.

    Args:
        steps: the chunks that each operation uses at once, in order.
        block_count: the number of chunks that the cache holds.

    Raises:
        ValueError: an operation uses more chunks than the cache holds.
    """
    nexts: list[dict[int, int]] = []
    seen: dict[int, int] = {}
    for index in range(len(steps) - 1, -1, -1):
        nexts.append({chunk: seen.get(chunk, len(steps)) for chunk in steps[index]})
        seen.update(dict.fromkeys(steps[index], index))
    nexts.reverse()
    cached: dict[int, int] = {}  # each chunk, with the operation that uses it next
    evicted = 0
    for chunks, then in zip(steps, nexts, strict=True):
        if len(then) > block_count:
            raise ValueError(f"an operation uses {len(then)} chunks, the cache holds {block_count}")
        missing = sum(chunk not in cached for chunk in set(chunks))
        while len(cached) + missing > block_count:
            kept = (chunk for chunk in cached if chunk not in then)
            del cached[max(kept, key=lambda chunk: (cached[chunk], chunk))]
            evicted += 1
        cached.update(then)
    return 2 * (evicted + len(cached))


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A choice of the chunks' size.

    Attributes:
        size: the elements of a chunk.
        count: the number of chunks.
        block_count: the number of chunks that the GPU holds at once.
        waste: the elements of chunks that no parameter uses.
        moves: the moves in a step, as move_count() counts them.
    """

    size: int
    count: int
    block_count: int
    waste: int
    moves: int


def best_chunks(
    steps: Sequence[Sequence[int]],
    numels: Sequence[int],
    room: int,
    bounds: tuple[int, int, int],
    is_ahead: bool = False,
) -> Chunks:
    """Return the size of chunks that moves the fewest elements; of equal ones the smallest.

    Args:
        steps: the indices of the parameters that each operation uses, in order.
        numels: the sizes of the parameters, in order of first use.
        room: the elements that the GPU has room for.
        bounds: the least and the largest size, and the interval between two (search_range()).
        is_ahead: whether two chunks of the room are for prefetching.

    Raises:
        ValueError: no size leaves room for the chunks that one operation uses.
    """
    least, most, interval = bounds
    first = round_up(max(*numels, least), interval)
    room = room // interval * interval
    best: tuple[int, Chunks] | None = None
    for size in range(first, min(most, room) + 1, interval):
        of_param, waste = pack(numels, size)
        count = of_param[-1] + 1
        blocks = min(room // size - (_BLOCKS_AHEAD if is_ahead else 0), count)
        used = [sorted({of_param[index] for index in some}) for some in steps]
        if blocks < max(map(len, used)):
            continue
        moves = move_count(used, blocks)
        if best is None or moves * size < best[0]:
            best = moves * size, Chunks(size, count, blocks, waste, moves)
    if best is None:
        raise ValueError(f"room for {room} elements is too small for chunks of {first} elements")
    return best[1]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of all n GPUs of a server together: GB/s, and 1e9 elements/s of AdamW."""

    to_gpu: float
    from_gpu: float
    cpu: float
    gpu: float


def authors_rates(gpu_count: int) -> Rates:
    """Return the rates that Elixir's authors measured on their server of A100."""
    return Rates(
        to_gpu=16.3 * gpu_count + 8.7,
        from_gpu=15.8 * gpu_count + 2.3,
        cpu=1.66 * math.log(gpu_count) + 5.15,
        gpu=50.0 * gpu_count,
    )


def cache_gain(rates: Rates) -> float:
    """Return I(n), the time that an element's place in the rCache saves: it stays, unmoved."""
    return PARAM_BYTES / rates.to_gpu + PARAM_BYTES / rates.from_gpu


def states_gain(rates: Rates, gpu_count: int) -> float:
    """Return J(n), the time that the same bytes save if states of n / 7 elements are in them.

    Their parameters and gradients do not move, and the GPU updates them.
    """
    saved = MASTER_BYTES / rates.to_gpu + cache_gain(rates) + PARAM_BYTES / rates.from_gpu
    return gpu_count / STATES_FACTOR * (saved + 1 / rates.cpu - 1 / rates.gpu)


def is_cache_first(rates: Rates, gpu_count: int) -> bool:
    """Return whether I(n) > J(n): memory goes to the rCache before it goes to states."""
    return cache_gain(rates) > states_gain(rates, gpu_count)


def room_of(gpu_bytes: int, buffer_bytes: int, activation_bytes: int) -> int:
    """Return the bytes of a GPU that chunks and states may take."""
    used = _DRIVER_BYTES + buffer_bytes + _ACTIVATION_FACTOR * activation_bytes
    return int(_ROOM_FACTOR * (gpu_bytes - used))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the GPU's memory is used for.

    Attributes:
        block_count: the blocks of the rCache.
        gpu_chunk_count: the chunks whose parameters and states are on the GPUs.
    """

    block_count: int
    gpu_chunk_count: int


def plan(chunks: Chunks, room: int, gpu_count: int, rates: Rates, is_ahead: bool = False) -> Plan:
    """Divide the room of a GPU between blocks of the rCache and states.

    Args:
        chunks: the chunks; their block_count is what the search found room for.
        room: the elements of 16 bits that the GPU has room for.
        gpu_count: the number of GPUs that share each chunk.
        rates: the rates of the server.
        is_ahead: whether chunks are prefetched.
    """
    if is_cache_first(rates, gpu_count):
        blocks = chunks.block_count
    else:
        blocks = min(_BLOCKS_MIN + (_BLOCKS_AHEAD if is_ahead else 0), chunks.block_count)
    left = room - blocks * chunks.size
    each = STATES_FACTOR * chunks.size // gpu_count
    on_gpu = min(max(0, left // each), chunks.count)
    left -= on_gpu * each
    extra = min(max(0, left // chunks.size), chunks.block_count - blocks)
    return Plan(blocks + extra, on_gpu)
