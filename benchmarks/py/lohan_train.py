"""lohan as a contestant of bench_peers.py: all states on SSD, default settings except the budget.

    python benchmarks/py/lohan_train.py STORE HOST_BYTES [OPTIMIZER MOMENTS]

OPTIMIZER is one of training.HYPERS, and MOMENTS the format of its moments.
"""

from __future__ import annotations

import sys
from typing import Any

import lohan
import served
import torch
import training


def main() -> None:
    pipe = served.answers()
    store, host_bytes = sys.argv[1], int(sys.argv[2])
    optimizer, moments = [*sys.argv[3:], "AdamW", "fp32"][:2]
    hyper = {**training.HYPERS[optimizer], "method": optimizer.lower(), "moments": moments}
    model = training.build(torch.bfloat16)
    weights = training.fingerprint(model)
    model = lohan.wrap(model, store=store, host_bytes=host_bytes, **hyper)

    def step(batch: training.Batch) -> torch.Tensor:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.optimizer.step()
        return loss.detach()

    def stats() -> dict[str, Any]:
        last = model.lohan.stats()
        return {
            "bound_by": last.bound_by,
            "busy": {name: round(share, 3) for name, share in last.busy.items()},
            "read_bytes": last.read_bytes,
            "written_bytes": last.written_bytes,
            "pages": model.lohan.status()["pages"],
        }

    training.serve(pipe, weights, step, model.lohan.flush, stats)
    model.lohan.close()


if __name__ == "__main__":
    main()
