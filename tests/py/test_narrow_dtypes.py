"""Frozen parameters and buffers in dtypes of 8 and 4 bits: trained beside, exported, or refused."""

from __future__ import annotations

import pathlib
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import ModelError
from safetensors.torch import load_file, save_file
from torch import nn

EIGHT = ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e5m2")


class Beside(nn.Module):
    """A layer beside frozen bytes, which it holds as parameters and buffers."""

    def __init__(self, dtypes: tuple[str, ...], seed: int) -> None:
        """Draw the bytes."""
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8)
        for name in dtypes:
            bits = torch.randint(1, 100, (2, 64), dtype=torch.uint8).view(getattr(torch, name))
            self.register_parameter(f"p_{name}", nn.Parameter(bits[0], requires_grad=False))
            self.register_buffer(f"b_{name}", bits[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with the layer only."""
        y: torch.Tensor = self.layer(x)
        return y


def bits_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.view(torch.uint8) for name, value in state.items() if "layer" not in name}


def test_eight_bits_are_exported_as_safetensors_writes_them_and_read_again(
    tmp_path: pathlib.Path,
) -> None:
    model: Any = Beside(EIGHT, 0)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    lohan.wrap(model, store=tmp_path / "store", lr=1e-3)
    model(torch.ones(2, 8)).sum().backward()
    model.optimizer.step()
    model.lohan.close()
    lohan.export(tmp_path / "store", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    found = load_file(path)
    torch.testing.assert_close(bits_of(found), bits_of(expected), rtol=0, atol=0)
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    save_file(found, tmp_path / "by_library.safetensors", {"format": "pt"})
    written = (tmp_path / "by_library.safetensors").read_bytes()
    assert len(path.read_bytes()) >= len(written)
    assert path.read_bytes()[-1000:] == written[-1000:]
    again: Any = lohan.wrap(Beside(EIGHT, 1), store=tmp_path / "again", lr=1e-3, weights=path)
    torch.testing.assert_close(bits_of(again.state_dict()), bits_of(expected), rtol=0, atol=0)
    again.lohan.close()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "bits8", "int4"])
def test_packed_bits_are_refused_at_wrap_and_train_as_bytes(
    name: str, kind: str, tmp_path: pathlib.Path
) -> None:
    model: Any = Beside((name,), 0)
    left, other = f"{kind[0]}_{name}", f"{'b' if kind == 'parameter' else 'p'}_{name}"
    delattr(model, other)
    with pytest.raises(
        ModelError, match=rf"{kind} '{left}' is torch\.{name}.*view\(torch\.uint8\)"
    ):
        lohan.wrap(model, store=tmp_path / "store", lr=1e-3)
    bits = getattr(model, left).view(torch.uint8)
    delattr(model, left)
    if kind == "buffer":
        model.register_buffer(left, bits)
    else:
        model.register_parameter(left, nn.Parameter(bits, requires_grad=False))
    lohan.wrap(model, store=tmp_path / "store", lr=1e-3)
    model(torch.ones(2, 8)).sum().backward()
    model.optimizer.step()
    model.lohan.close()
    lohan.export(tmp_path / "store", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[left], bits)


def test_a_complex_buffer_is_exported_or_refused_at_wrap(tmp_path: pathlib.Path) -> None:
    def make(dtype: torch.dtype, *, is_saved: bool = True) -> Any:
        model = nn.Linear(8, 8)
        model.register_buffer("waves", torch.full((3,), 1 + 2j, dtype=dtype), persistent=is_saved)
        return model

    with pytest.raises(ModelError, match=r"buffer 'waves' is torch\.complex128.*view_as_real"):
        lohan.wrap(make(torch.complex128), store=tmp_path / "no", lr=1e-3)
    for dtype, is_saved in ((torch.complex64, True), (torch.complex128, False)):
        model = lohan.wrap(make(dtype, is_saved=is_saved), store=tmp_path / str(dtype), lr=1e-3)
        model.lohan.close()
        out = tmp_path / f"out-{dtype}"
        lohan.export(tmp_path / str(dtype), out)
        assert ("waves" in load_file(out / "model.safetensors")) == is_saved
