"""Zeroth-order training under lohan learns a task of real text, by the same curve as MeZO's.

The task is to decide from which of two books a sentence is: the reference of the language (pydoc's
topics) or the docstrings of torch.nn and torch.optim. As in MeZO, the sentence becomes a prompt,
and the loss is the cross-entropy of two words that may follow it. Zeroth order would hardly teach a
random model anything. Therefore AdamW first trains the model in memory to answer with two other
words, and the task is to give the same answers in words that it was not taught.
"""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import functools
import pathlib
import pydoc_data.topics
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import pytest
import torch
from kit import host_bytes_min
from lohan.common._inside import inside
from mezo_helper import SEED, Plain, Settings
from torch import nn
from torch.nn import functional

BATCH = 32
HELD_OUT = 384
VOCAB = 600
TOKENS = 26
WORDS_MIN = 8
PAD, UNKNOWN, FIRST_WORD = 0, 1, 8
PROMPT = [2, 3]  # "It was"
TAUGHT = [4, 5]
ASKED = [6, 7]
# Words that would reveal the answer.
LEFT_OUT = {"python", "torch", "pytorch"}
WARM_LR = 3e-3
WARM_STEPS = 80


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations of this size take longer on two threads."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


# --- The task -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """Prompts (rows, TOKENS) and which book each is from."""

    prompts: torch.Tensor
    books: torch.Tensor

    def batch(self, step: int) -> Rows:
        """Return the batch of a step, which depends only on the step."""
        generator = torch.Generator().manual_seed(step)
        chosen = torch.randint(0, len(self.books), (BATCH,), generator=generator)
        return Rows(self.prompts[chosen], self.books[chosen])


def sentences(text: str) -> Iterator[tuple[str, ...]]:
    """Words of each sentence of some length that is prose rather than code."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            words = re.findall(r"[a-z]+", sentence.lower())
            prose = sum(c.isalpha() or c in " ,.'-" for c in sentence)
            if len(words) >= WORDS_MIN and prose > 0.93 * len(sentence):
                yield tuple(word for word in words if word not in LEFT_OUT)


def docstrings(root: pathlib.Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield ast.get_docstring(node) or ""


@functools.cache
def books() -> tuple[Rows, Rows]:
    """Return training and held-out rows without common sentences, half from each book."""
    root = pathlib.Path(torch.__file__).parent
    texts = [
        [text for _, text in sorted(pydoc_data.topics.topics.items())],
        [text for part in ("nn/modules", "optim") for text in docstrings(root / part)],
    ]
    found = [list(dict.fromkeys(s for text in book for s in sentences(text))) for book in texts]
    draw = random.Random(0)
    count = min(map(len, found))
    rows = [(words, book) for book in (0, 1) for words in draw.sample(found[book], count)]
    draw.shuffle(rows)
    held, training = rows[:HELD_OUT], rows[HELD_OUT:]
    seen = collections.Counter(word for words, _ in training for word in words)
    common = seen.most_common(VOCAB - FIRST_WORD)
    number = {word: FIRST_WORD + i for i, (word, _) in enumerate(common)}

    def made(part: list[tuple[tuple[str, ...], int]]) -> Rows:
        prompts = torch.full((len(part), TOKENS), PAD)
        for row, (words, _) in zip(prompts, part, strict=True):
            ids = [number.get(word, UNKNOWN) for word in words][: TOKENS - len(PROMPT)] + PROMPT
            row[-len(ids) :] = torch.tensor(ids)
        return Rows(prompts, torch.tensor([book for _, book in part]))

    return made(training), made(held)


def said(model: Any, rows: Rows, words: list[int]) -> torch.Tensor:
    """Return the logits (rows, 2) of two words after the prompt."""
    mask = (rows.prompts != PAD).long()
    logits: torch.Tensor = model(input_ids=rows.prompts, attention_mask=mask).logits
    return logits[:, -1, words]


def loss_of(model: Any, rows: Rows, words: list[int]) -> torch.Tensor:
    return functional.cross_entropy(said(model, rows, words), rows.books)


@torch.no_grad()
def accuracy(model: Any, rows: Rows, words: list[int]) -> float:
    return (said(model, rows, words).argmax(1) == rows.books).float().mean().item()


# --- Runs -----------------------------------------------------------------------------------------


@functools.cache
def _taught() -> tuple[nn.Module, list[int]]:
    """Return a model that AdamW trained, and the words of each book that it has still to learn."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        pad_token_id=PAD,
        dropout=0.0,
        use_cache=False,
    )
    model: nn.Module = OPTForCausalLM(config).float().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR)
    training = books()[0]
    for step in range(WARM_STEPS):
        loss_of(model, training.batch(-1 - step), TAUGHT).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Which word is whose is open: as the model would rather not have it, so that there is something
    # to learn.
    is_known = accuracy(model, training, ASKED) > 0.5
    return model, ASKED[::-1] if is_known else ASKED


def taught() -> Any:
    """Return the model with which training starts."""
    return copy.deepcopy(_taught()[0])


def curve_of(
    model: Any, step: Callable[[Callable[[], Any]], Any], count: int, every: int
) -> list[float]:
    """Return the accuracy on held-out data, before training and at regular steps."""
    training, held = books()
    words = _taught()[1]
    curve = [accuracy(model, held, words)]
    for number in range(count):
        rows = training.batch(number)
        step(lambda rows=rows: loss_of(model, rows, words))
        if (number + 1) % every == 0:
            curve.append(accuracy(model, held, words))
    return curve


def compare(
    settings: Settings, count: int, every: int, store: pathlib.Path
) -> tuple[list[float], list[float]]:
    """Return both curves: lohan's, with the smallest budget, and MeZO's in memory."""
    plain = Plain(taught(), settings)
    expected = curve_of(plain.model, plain.step, count, every)
    asked = {"lr": settings.lr, "eps": settings.eps, "seed": SEED, "rng": settings.rng}
    model = taught()
    least = host_bytes_min(model, store, method="mezo", **asked)
    model = lohan.wrap(model, store=store / "run", method="mezo", host_bytes=least, **asked)
    curve = curve_of(model, model.zo_step, count, every)
    nbytes = sum(unit.nbytes for unit in inside(model).layout.units)
    assert model.optimizer.read_bytes > count * nbytes / 2, "blocks come and go in each step"
    print(settings.rng, [round(value, 3) for value in curve])
    model.lohan.close()
    return curve, expected


RNGS = ["philox", "torch"]
# Of the accuracy, after 400 steps. How far plain MeZO comes depends on how the CPU rounds: from
# 0.46 to 0.79 on one, above 0.8 on another.
LEARNT = 0.3


@pytest.mark.long
@pytest.mark.parametrize("storage", ["bf16", "fp16", "fp8"])
def test_the_task_is_learnt_by_parameters_that_are_kept_in_fewer_bits(
    storage: str, store_dir: pathlib.Path
) -> None:
    asked = {"lr": 2e-4, "eps": 1e-3, "seed": SEED, "storage": storage}
    model = lohan.wrap(taught(), store=store_dir, method="mezo", **asked)
    curve = curve_of(model, model.zo_step, 400, 40)
    print(storage, [round(value, 3) for value in curve])
    model.lohan.close()
    assert curve[-1] >= curve[0] + LEARNT


@pytest.mark.parametrize("rng", ["philox", pytest.param("torch", marks=pytest.mark.slow)])
def test_accuracy_is_mezo_s_at_each_point_and_rises(rng: str, store_dir: pathlib.Path) -> None:
    curve, expected = compare(Settings(lr=5e-4, rng=rng), 40, 5, store_dir)
    assert curve == expected
    assert curve[-1] >= curve[0] + 0.2


@pytest.mark.long
@pytest.mark.parametrize("rng", RNGS)
def test_over_hundreds_of_steps_it_is_too_and_the_task_is_learnt(
    rng: str, store_dir: pathlib.Path
) -> None:
    curve, expected = compare(Settings(lr=2e-4, rng=rng), 400, 20, store_dir)
    assert curve == expected
    assert curve[-1] >= curve[0] + LEARNT
