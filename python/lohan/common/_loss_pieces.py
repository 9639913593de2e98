"""The pieces of tokens in which `lohan.losses` computes, for the loss itself and for plans."""

from __future__ import annotations

import math

# The logits of a piece of tokens may take this share of the hidden states and the head together,
# or this many bytes if that is more: products of few tokens wait for memory.
_PIECE_SHARE = 0.25
_PIECE_BYTES_MIN = 32 << 20
_PIECE_TOKENS_MIN = 16
# Gradients are summed in fp32 until backward.
_SUM_BYTES = 4


def piece_tokens(tokens: int, vocab: int, operand_bytes: int, logit_bytes: int) -> int:
    """Return how many tokens have logits at a time, in pieces of about the same size.

    Args:
        tokens: the number of tokens, at least 1.
        vocab: the number of entries of the vocabulary.
        operand_bytes: the bytes of hidden states and head.
        logit_bytes: the size of a logit.
    """
    share = int(_PIECE_SHARE * operand_bytes)
    rows = max(max(share, _PIECE_BYTES_MIN) // (vocab * logit_bytes), _PIECE_TOKENS_MIN)
    return math.ceil(tokens / math.ceil(tokens / min(rows, tokens)))


def working_bytes(
    tokens: int, hidden: int, vocab: int, item_bytes: int, *, trained: bool = True
) -> int:
    """Return the memory that `linear_cross_entropy` needs from its forward to its backward.

    That is the logits of a piece, the sums of gradients, the hidden states, and their gradient. The
    head's own gradient is not included.

    Args:
        tokens: the number of tokens.
        hidden: the number of features.
        vocab: the number of entries of the vocabulary.
        item_bytes: the size of an element of hidden states and head: 2 or 4.
        trained: whether the head has a gradient.
    """
    operands = (tokens + vocab) * hidden * item_bytes
    logits = piece_tokens(tokens, vocab, operands, _SUM_BYTES) * vocab * _SUM_BYTES
    sums = (tokens + (vocab if trained else 0)) * hidden * _SUM_BYTES
    return logits + sums + 2 * tokens * hidden * item_bytes
