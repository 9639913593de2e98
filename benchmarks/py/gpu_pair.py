"""One process of `gpu.sh features pair`: trains a small model, and prints a hash of its parameters.

python benchmarks/py/gpu_pair.py STORE SETTINGS

SETTINGS is a JSON object of settings of lohan.wrap. Each process computes its part of the four rows
of a batch on the first GPU, or on the emulated one in a dry run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import dataclasses

import lohan
import torch
from gpu_llama import TINY, build
from gpu_part import Place

SHAPE = dataclasses.replace(TINY, vocab=512, width=256, heads=4, mlp=512, rows=4, tokens=128)
DRY = dataclasses.replace(TINY, rows=4)
STEPS, ROWS = 4, 2


def main() -> None:
    place = Place()
    shape = place.pick(SHAPE, DRY)
    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = lohan.wrap(
        build(shape, torch.float32),
        store=sys.argv[1],
        device=place.lohan,
        allow_tmpfs=True,
        lr=1e-3,
        **json.loads(sys.argv[2]),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, shape.vocab, (shape.rows, shape.tokens), generator=generator)
        parts = tokens.to(place.device).split(ROWS)
        for part in parts if count == 1 else [parts[rank]]:
            loss = model(part) / (len(parts) if count == 1 else 1)
            loss.backward()
        model.optimizer.step()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    model.lohan.close()
    print(digest.hexdigest()[:16])


if __name__ == "__main__":
    main()
