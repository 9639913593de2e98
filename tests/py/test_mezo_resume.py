"""A zeroth-order run goes on with the blocks that it was made with."""

from __future__ import annotations

import pathlib

import lohan
import pytest
import torch
from lohan.errors import StoreMismatchError
from mezo_helper import Plain, Settings, batches, differing, gpt2, loss_of, steps
from test_mezo import wrapped
from torch import nn


@pytest.mark.parametrize("only", ["", "c_attn"])
def test_blocks_are_split_as_they_were_then_whatever_the_budget(
    only: str, store_dir: pathlib.Path
) -> None:
    def made() -> nn.Module:
        model = gpt2()
        for name, param in model.named_parameters():
            param.requires_grad_(only in name)
        return model

    data = batches(4)
    plain = Plain(made(), Settings())
    losses = [float(torch.tensor(plain.step(lambda b=b: loss_of(plain.model, b)))) for b in data]
    model = wrapped(made(), store_dir, "least")
    assert steps(model, data[:2]) == losses[:2]
    units = len(model.lohan.layout.units)
    model.lohan.close()
    assert units > len(wrapped(made(), store_dir / "free").lohan.layout.units)
    model = lohan.wrap(made(), store=store_dir, method="mezo", resume=True)
    assert len(model.lohan.layout.units) == units
    assert steps(model, data[2:]) == losses[2:]
    assert differing(model, plain.values()) == []
    model.lohan.close()
    with pytest.raises(StoreMismatchError, match="in other blocks: leave blocks= out"):
        lohan.wrap(
            (again := made()),
            store=store_dir,
            method="mezo",
            resume=True,
            blocks=[again.transformer.h[0]],
        )
