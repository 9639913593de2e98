"""The search of Elixir's authors: results by hand, and a direct transcription to compare with.

The transcription below follows src/simulator.cpp of github.com/hpcaitech/Elixir step by step, with
its priority queue and its entries that become stale.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest
from lab import elixir

MIB = 1 << 20
GIB = 1 << 30


def moves_by_queue(steps: Sequence[Sequence[int]], blocks: int) -> int:
    """Count moves as the authors' program does."""
    nexts, seen = {}, {}
    for index in reversed(range(len(steps))):
        for chunk in steps[index]:
            nexts[index, chunk] = seen.get(chunk, len(steps))
            seen[chunk] = index
    is_in = dict.fromkeys(seen, False)
    queue: list[tuple[int, int]] = []
    size = count = 0
    for index, chunks in enumerate(steps):
        missing = sum(not is_in[chunk] for chunk in chunks)
        while size + missing > blocks:
            after, chunk = heapq.heappop(queue)
            assert -after > index and is_in[-chunk]
            is_in[-chunk] = False
            size -= 1
            count += 1
        for chunk in chunks:
            heapq.heappush(queue, (-nexts[index, chunk], -chunk))
            size += not is_in[chunk]
            is_in[chunk] = True
    return 2 * (count + size)


def test_moves_of_the_authors_own_test() -> None:
    assert elixir.move_count([[0], [1, 2], [3], [3], [1, 2], [0]], 2) == 12


@pytest.mark.parametrize(
    ("blocks", "moves"),
    # 4 chunks forward and back. With 1 block: 7 loads, as the last chunk is used twice in a row.
    # Each further block saves a load in backward; with 4, each chunk is loaded once.
    [(1, 14), (2, 12), (3, 10), (4, 8), (9, 8)],
)
def test_moves_of_a_forward_and_a_backward(blocks: int, moves: int) -> None:
    steps = [[0], [1], [2], [3], [3], [2], [1], [0]]
    assert elixir.move_count(steps, blocks) == moves


def test_moves_equal_those_of_the_authors_queue_on_random_orders() -> None:
    generator = random.Random(1)
    for _ in range(500):
        count = generator.randint(1, 8)
        steps = [
            generator.sample(range(count), generator.randint(1, min(3, count)))
            for _ in range(generator.randint(1, 20))
        ]
        blocks = generator.randint(max(map(len, steps)), count + 1)
        assert elixir.move_count(steps, blocks) == moves_by_queue(steps, blocks)


def test_an_operation_that_uses_more_chunks_than_the_cache_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="uses 3 chunks, the cache holds 2"):
        elixir.move_count([[0], [1, 2, 3]], 2)


def test_the_search_range_begins_at_32_mib_doubled_until_the_largest_parameter_fits() -> None:
    half = 2
    # 10 parameters: 16 rounded up, 2^24 / 32 tries, so the least interval of 1024 bytes.
    assert elixir.search_range([MIB] * 10, half) == (16 * MIB, 48 * MIB, 512)
    assert elixir.search_range([16 * MIB + 1], half)[:2] == (32 * MIB, 96 * MIB)
    # GPT 20B: 4 x 8192^2 parameters are 512 MiB.
    assert elixir.search_range([4 * 8192**2], half)[0] * half == 512 * MIB
    # 5000 parameters: 8192 rounded up, 1024 tries in a gap of 64 MiB are 64 KiB apart.
    assert elixir.search_range([1] * 5000, half)[2] * half == 64 * MIB // 1024


@pytest.mark.parametrize(
    ("numels", "chunk", "chunks", "waste"),
    [
        ([3, 3, 3], 9, [0, 0, 0], 0),
        ([3, 3, 3], 6, [0, 0, 1], 3),
        ([4, 4, 4], 6, [0, 1, 2], 6),
        ([1, 6, 1], 6, [0, 1, 2], 10),
    ],
)
def test_parameters_are_packed_in_order_and_never_split(
    numels: list[int], chunk: int, chunks: list[int], waste: int
) -> None:
    assert elixir.pack(numels, chunk) == (chunks, waste)


def test_the_smallest_chunk_that_wastes_least_is_taken_over_all_groups() -> None:
    # One group: 6 and 12 waste nothing. The second one, [4, 4], wastes 4 in chunks of 6 and of 12.
    assert elixir.least_waste([[2, 4, 6]], 4, 12, 2) == (6, 0)
    assert elixir.least_waste([[2, 4, 6], [4, 4]], 4, 12, 2) == (6, 4)
    # three in each chunk of 9, but only two in 8
    assert elixir.least_waste([[3, 3, 3]], 7, 9, 1) == (9, 0)
    # sizes are multiples of the interval that hold the largest parameter
    assert elixir.least_waste([[5, 5]], 1, 12, 4) == (12, 2)


def test_the_best_chunk_moves_the_fewest_elements_in_the_room() -> None:
    numels = [4, 4, 4, 4]
    steps = [[0], [1], [2], [3], [3], [2], [1], [0]]
    # Room for 8: two blocks of 4 (12 moves, 48 elements), or one of 8 (2 chunks: 6 moves, 48).
    found = elixir.best_chunks(steps, numels, 8, (4, 8, 4))
    assert found == elixir.Chunks(size=4, count=4, block_count=2, waste=0, moves=12)
    # Room for 16: everything fits, 8 moves of 4 elements.
    assert elixir.best_chunks(steps, numels, 19, (4, 16, 4)).moves == 8
    # Two blocks are for prefetching.
    ahead = elixir.best_chunks(steps, numels, 16, (4, 8, 4), is_ahead=True)
    assert (ahead.size, ahead.block_count, ahead.moves) == (4, 2, 12)
    with pytest.raises(ValueError, match="room for 3 elements"):
        elixir.best_chunks(steps, numels, 3, (1, 8, 1))


def test_the_best_chunk_is_that_of_trying_all_sizes() -> None:
    generator = random.Random(2)
    for _ in range(50):
        numels = [generator.randint(1, 9) for _ in range(generator.randint(2, 10))]
        order = list(range(len(numels)))
        steps = [[index] for index in (*order, *reversed(order))]
        room = generator.randint(12, 40)
        found = elixir.best_chunks(steps, numels, room, (2, 30, 1))
        tried = {}
        for size in range(max(*numels, 2), min(30, room) + 1):
            of_param, _ = elixir.pack(numels, size)
            blocks = min(room // size, of_param[-1] + 1)
            tried[size] = size * moves_by_queue([[of_param[i[0]]] for i in steps], blocks)
        assert found.size == min(tried, key=lambda size: (tried[size], size))
        assert found.moves * found.size == tried[found.size]


@pytest.mark.parametrize(
    ("gpus", "cache", "states"),
    [(1, 0.190, 0.091), (2, 0.107, 0.118), (4, 0.058, 0.155), (8, 0.030, 0.215)],
)
def test_one_gpu_gives_memory_to_the_cache_first_and_more_give_it_to_states(
    gpus: int, cache: float, states: float
) -> None:
    rates = elixir.authors_rates(gpus)
    assert elixir.cache_gain(rates) == pytest.approx(cache, abs=6e-4)
    assert elixir.states_gain(rates, gpus) == pytest.approx(states, abs=6e-4)
    assert elixir.is_cache_first(rates, gpus) is (gpus == 1)


def test_the_room_is_what_driver_buffers_and_activations_leave() -> None:
    assert elixir.room_of(40 * GIB, GIB, 8 * GIB) == int(0.95 * 27 * GIB)


def test_room_is_divided_by_what_gains_more() -> None:
    chunks = elixir.Chunks(size=100, count=20, block_count=10, waste=0, moves=0)
    one, two = elixir.authors_rates(1), elixir.authors_rates(2)
    # One GPU: all 10 blocks, then states: 700 elements a chunk.
    assert elixir.plan(chunks, 2500, 1, one) == elixir.Plan(10, 2)
    # Two: 4 blocks, then states of 350 a chunk and GPU, and what is left is blocks again.
    assert elixir.plan(chunks, 2500, 2, two) == elixir.Plan(4, 6)
    assert elixir.plan(chunks, 2500 + 200, 2, two) == elixir.Plan(6, 6)
    assert elixir.plan(chunks, 2500, 2, two, is_ahead=True) == elixir.Plan(7, 5)
    assert elixir.plan(chunks, 10**6, 2, two) == elixir.Plan(10, 20)
