"""Buffers are filled from files as parameters are, and a file's unused tensors are reported."""

from __future__ import annotations

import pathlib

import kit
import lohan
import pytest
import torch
from lohan.errors import ModelError
from notes_helper import notes
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=256,
)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_persistent_buffers_have_the_values_of_the_files(
    is_frozen: bool, store_dir: pathlib.Path
) -> None:
    source = normed().eval()
    source[1].running_mean.fill_(3.0)
    source[1].running_var.fill_(9.0)
    source[1].num_batches_tracked.fill_(7)
    save_file(source.state_dict(), store_dir / "model.safetensors")
    with lohan.empty():
        model = normed().eval()
    model[0].requires_grad_(not is_frozen)
    model = lohan.wrap(model, store=store_dir / "s", weights=store_dir)
    batch = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(model(batch), source(batch))
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())
    model.lohan.close()
    with lohan.empty():
        again = normed().eval()
    again[0].requires_grad_(not is_frozen)
    again = lohan.wrap(again, store=store_dir / "s", resume=True)
    assert torch.equal(again[1].running_mean, source[1].running_mean)
    again.lohan.close()


class Fixed(nn.Module):
    """A batch norm whose weights are buffers, in the place of a usual one, as detectors have it."""

    def __init__(self, plain: nn.BatchNorm1d) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(4))
            if getattr(plain, name).device != torch.device("meta"):
                with torch.no_grad():
                    getattr(self, name).copy_(getattr(plain, name))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made = (inputs - self.running_mean) * self.running_var.rsqrt()
        return made * self.weight + self.bias


def test_buffers_that_a_constructor_fills_like_a_parameter_have_storage(
    store_dir: pathlib.Path,
) -> None:
    save_file(normed().state_dict(), store_dir / "model.safetensors")
    with lohan.empty():
        model = normed()
        model.register_buffer("integers", torch.full_like(model[0].weight, 3, dtype=torch.int32))
        model.register_buffer("zeros", torch.zeros_like(model[0].weight))
    model = lohan.wrap(model, store=store_dir / "s", weights=store_dir)
    assert torch.equal(model.integers, torch.full((4, 4), 3, dtype=torch.int32))
    assert torch.equal(model.zeros, torch.zeros(4, 4))
    model.lohan.close()


def fixed() -> nn.Sequential:
    made = normed()
    made[1] = Fixed(made[1])
    return made


def test_buffers_that_a_constructor_copies_from_parameters_come_from_the_files(
    store_dir: pathlib.Path,
) -> None:
    source = fixed()
    source[1].weight.fill_(2.0)
    save_file(source.state_dict(), store_dir / "model.safetensors")
    with lohan.empty():
        model = fixed()
    model = lohan.wrap(model.double().float(), store=store_dir / "s", weights=store_dir)
    batch = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(model(batch), source(batch))
    model.lohan.close()
    left = {name: value for name, value in source.state_dict().items() if name != "1.bias"}
    save_file(left, store_dir / "model.safetensors")
    for given in ({"weights": store_dir}, {"init": lambda module: None}):
        with lohan.empty():
            model = fixed()
        with pytest.raises(ModelError, match=r"buffer '1\.(bias|weight)' was copied from a param"):
            lohan.wrap(model, store=store_dir / "t", **given)


def test_a_buffer_of_another_shape_is_refused(store_dir: pathlib.Path) -> None:
    state = normed().state_dict()
    state["1.running_mean"] = torch.zeros(5)
    save_file(state, store_dir / "model.safetensors")
    with lohan.empty():
        model = normed()
    with pytest.raises(ModelError, match=r"1\.running_mean is \[5\], but the model has \[4\]"):
        lohan.wrap(model, store=store_dir / "s", weights=store_dir)
    assert not (store_dir / "s").exists()


def test_tensors_that_the_model_has_no_place_for_are_said(
    store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(CONFIG).save_pretrained(store_dir / "w")
    fewer = LlamaConfig.from_pretrained(store_dir / "w", num_hidden_layers=1)
    with lohan.empty():
        model = LlamaForCausalLM(fewer)
    lohan.wrap(model, store=store_dir / "a", weights=store_dir / "w").lohan.close()
    said = capsys.readouterr().err
    assert "9 tensors of weights=" in said and "'model.layers.1." in said and "are ignored" in said
    with lohan.empty():
        model = LlamaForCausalLM(CONFIG)
    lohan.wrap(model, store=store_dir / "b", weights=store_dir / "w").lohan.close()
    assert "are ignored" not in capsys.readouterr().err


def test_a_model_made_in_its_dtype_is_the_one_of_from_pretrained(
    store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(store_dir / "w")
    plain = AutoModelForCausalLM.from_pretrained(store_dir / "w", dtype=torch.bfloat16).eval()
    batch = torch.arange(200)[None] % 64
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model = lohan.wrap(model, store=store_dir / "a", weights=store_dir / "w").eval()
    assert "lohan:" not in notes(capsys.readouterr().err)
    with torch.no_grad():
        assert torch.equal(model(batch).logits, plain(batch).logits)
    model.lohan.close()
    with lohan.empty():
        converted = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
        converted = converted.to(torch.bfloat16)
    converted = lohan.wrap(converted, store=store_dir / "b", weights=store_dir / "w")
    said = capsys.readouterr().err
    assert "'model.rotary_emb.inv_freq' was rounded to torch.bfloat16" in said
    assert "from_config(config, dtype=torch.bfloat16)" in said
    converted.lohan.close()


def test_buffers_without_storage_are_refused_with_the_way_to_have_them(
    store_dir: pathlib.Path,
) -> None:
    LlamaForCausalLM(CONFIG).save_pretrained(store_dir / "w")
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    with pytest.raises(ModelError, match=r"inv_freq' has no storage: build .* in lohan\.empty\(\)"):
        lohan.wrap(model, store=store_dir / "s", weights=store_dir / "w")


def test_a_module_whose_buffers_are_computed_from_its_weight_is_created_outside(
    store_dir: pathlib.Path,
) -> None:
    def layers() -> tuple[nn.Module, nn.Module]:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2)

    plain = nn.Sequential(*layers())
    plain(torch.ones(2, 8))
    (store_dir / "w").mkdir()
    save_file(dict(plain.state_dict()), store_dir / "w" / "model.safetensors")
    with lohan.empty():
        model = nn.Sequential(*layers())
    with pytest.raises(ModelError, match=r"_u' has no storage: .* outside of lohan\.empty\(\)"):
        lohan.wrap(model, store=store_dir / "s", weights=store_dir / "w")
    first, _ = layers()  # the way out
    with lohan.empty():
        model = nn.Sequential(first, nn.Linear(8, 2))
    model = lohan.wrap(model, store=store_dir / "s", weights=store_dir / "w")
    kit.assert_same_state(dict(model.state_dict()), dict(plain.state_dict()))
    model.lohan.close()
