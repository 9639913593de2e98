"""Training in memory as a contestant of bench_peers.py.

python benchmarks/py/torch_train.py autocast | masters
"""

from __future__ import annotations

import sys

import served
import torch
import training


def autocast_step(model: torch.nn.Module) -> training.Step:
    """Make a step with fp32 weights, bf16 compute and fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **training.HYPER)

    def step(batch: training.Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def masters_step(model: torch.nn.Module) -> training.Step:
    """Make a step with bf16 weights and compute, fp32 masters and moments, and fused AdamW."""
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    grads = [torch.empty_like(m) for m in masters]
    optimizer = torch.optim.AdamW(masters, fused=True, **training.HYPER)

    def step(batch: training.Batch) -> torch.Tensor:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        with torch.no_grad():
            for param, master, grad in zip(params, masters, grads, strict=True):
                grad.copy_(param.grad)
                master.grad, param.grad = grad, None
            optimizer.step()
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        return loss.detach()

    return step


KINDS = {"autocast": (torch.float32, autocast_step), "masters": (torch.bfloat16, masters_step)}


def main() -> None:
    pipe = served.answers()
    dtype, make_step = KINDS[sys.argv[1]]
    model = training.build(dtype)
    training.serve(pipe, training.fingerprint(model), make_step(model))


if __name__ == "__main__":
    main()
