"""The random numbers of forwards that take turns: those that the same forwards would draw in order.

If forwards run one after the other, each begins with the state that the one before it has left. If
they take turns, that state is not known when they begin, so it is predicted from how many numbers
each of them drew in the last step, and compared at the end.

A generator on the CPU is a Mersenne Twister of 624 words, whose state after n numbers is known only
by drawing n numbers. A generator on CUDA counts the numbers, so its state is set directly.
"""

from __future__ import annotations

import itertools

import torch

_WORDS = 624
_HEAD_BYTES = 24  # the seed, the number of words left, and the index of the next word
_WORD_BYTES = 8
# Counting more numbers than this takes seconds; a forward that draws more does not take turns.
_COUNT_MAX = 1 << 26
_DRAW_MAX = 1 << 20
_OFFSET_FIRST = 8  # a state of CUDA is the seed and the offset, of 8 bytes each


def _words(state: torch.Tensor) -> torch.Tensor:
    return state[_HEAD_BYTES : _HEAD_BYTES + _WORDS * _WORD_BYTES]


def _drawn(state: torch.Tensor, count: int) -> torch.Tensor:
    """Return the state of a generator on the CPU after `count` more numbers."""
    generator = torch.Generator()
    generator.set_state(state)
    while count > 0:
        now = min(count, _DRAW_MAX)
        torch.empty(now, dtype=torch.uint8).random_(generator=generator)
        count -= now
    return generator.get_state()


def _left(state: torch.Tensor) -> int:
    """Return how many of a state's words have not been used."""
    return int(state[8:12].view(torch.int32)) - 1


def _count_cpu(begin: torch.Tensor, end: torch.Tensor) -> int | None:
    """Return how many numbers lie between two states; None if that is not known."""
    if torch.equal(begin, end):
        return 0
    ahead = _left(begin)
    count, state = (ahead, _drawn(begin, ahead)) if ahead > 0 else (0, begin)
    used = _WORDS - _left(end)
    if torch.equal(_words(begin), _words(end)):
        count, used = 0, _left(begin) - _left(end)
    else:
        while count <= _COUNT_MAX:
            first = _drawn(state, 1)
            if torch.equal(_words(first), _words(end)):
                break
            state = _drawn(state, _WORDS)
            count += _WORDS
    total = count + used
    return total if total <= _COUNT_MAX and torch.equal(_drawn(begin, total), end) else None


def _offset(state: torch.Tensor) -> int:
    return int(state[_OFFSET_FIRST : _OFFSET_FIRST + 8].clone().view(torch.int64))


def _moved(state: torch.Tensor, count: int) -> torch.Tensor:
    """Return the state of a generator on CUDA after `count` more numbers."""
    made = state.clone()
    made[_OFFSET_FIRST : _OFFSET_FIRST + 8] = torch.tensor([_offset(state) + count]).view(
        torch.uint8
    )
    return made


class RandomStarts:
    """The states in which the forwards of a step begin.

    A state is a list as random_states() returns it: the CPU's generator, then the device's, if that
    is another one.
    """

    def __init__(self) -> None:
        self._counts: list[list[int]] = []  # of each forward but the last, and each generator

    def predict(self, begin: list[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
        """Return the states in which `count` forwards begin, the first of them in `begin`."""
        starts = [begin]
        while len(starts) < count:
            counts = self._counts[len(starts) - 1] if len(starts) <= len(self._counts) else []
            moves = zip(counts, starts[-1], strict=False)
            now = [_drawn(s, n) if i == 0 else _moved(s, n) for i, (n, s) in enumerate(moves)]
            starts.append(now or starts[-1])
        return starts

    def learn(self, states: list[list[torch.Tensor]]) -> bool:
        """Set the counts from the states between forwards that ran one after the other.

        Args:
            states: the state in which each forward began.

        Returns:
            Whether predict() can know these states.
        """
        counts: list[list[int]] = []
        for begin, end in itertools.pairwise(states):
            now = [_count_cpu(begin[0], end[0])]
            now += [_offset(b) - _offset(a) for a, b in zip(begin[1:], end[1:], strict=True)]
            if None in now:
                return False
            counts.append([n for n in now if n is not None])
        self._counts = counts
        return True
