"""One process that loads, saves or exports a model of 1.3 billion parameters, or only imports.

Run as `python load_save_worker.py WORD FOLDER...`; it prints a JSON object with its peak memory.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import torch
import transformers
from large_worker import config, peak_bytes
from transformers import OPTForCausalLM

SHARD = "1GB"
HOST_BYTES = 1_000_000_000
PIECE = 4 << 20


def baseline() -> None:
    """Measure the memory of any process that uses the two libraries."""
    assert torch.ones(4).sum() == 4 and transformers.__version__


def make(folder: str) -> None:
    """A Hugging Face folder with random weights in bf16, as save_pretrained would write it."""
    import lohan
    from lohan.layout import _names, _safetensors

    with lohan.empty():
        model = OPTForCausalLM(config()).to(torch.bfloat16)
    index_of = {id(param): index for index, param in enumerate(model.parameters())}
    generator = torch.Generator().manual_seed(7)

    def pieces(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        left = torch.Size(shape).numel()
        while left > 0:
            count = min(left, PIECE)
            yield (torch.randn(count, generator=generator) * 0.02).to(torch.bfloat16)
            left -= count

    tensors = [
        _safetensors.Tensor(
            saved.name, saved.shape, saved.dtype, lambda shape=saved.shape: pieces(shape)
        )
        for saved in _names.saved(model, _names.sources(model, index_of))
    ]
    _safetensors.write(pathlib.Path(folder), tensors, max_shard_size=SHARD)
    model.config.save_pretrained(folder)


def load(folder: str, store: str) -> None:
    """Load from the folder directly into the store."""
    import lohan

    with lohan.empty():
        model = OPTForCausalLM(config()).to(torch.bfloat16)
    model = lohan.wrap(model, weights=folder, store=store, host_bytes=HOST_BYTES)
    model.lohan.close()


def save(store: str, out: str) -> None:
    """Save from a session with the store."""
    import lohan

    with lohan.empty():
        model = OPTForCausalLM(config()).to(torch.bfloat16)
    model = lohan.wrap(model, store=store, resume=True, host_bytes=HOST_BYTES)
    model.save_pretrained(out, max_shard_size=SHARD)
    model.lohan.close()


def export(store: str, out: str) -> None:
    """Export from the store alone."""
    import lohan

    lohan.export(store, out, max_shard_size=SHARD)


def verify(store: str) -> None:
    """Verify the store's checksums."""
    import lohan

    assert lohan.verify(store).is_whole


WORDS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (baseline, make, load, save, export, verify)
}

if __name__ == "__main__":
    torch.set_num_threads(2)
    started = time.monotonic()
    WORDS[sys.argv[1]](*sys.argv[2:])
    said = {"peak_bytes": peak_bytes(), "seconds": time.monotonic() - started, "pid": os.getpid()}
    print(json.dumps(said))
