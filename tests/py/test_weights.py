"""Sources of values: files, the model's own initialization, memory; and parameters without any."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import lohan
import pytest
import safetensors.torch
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import ModelError, SessionError, StoreError
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 32}
IDS = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**GPT2, **IDS))


def test_safetensors_fill_an_empty_model_bit_for_bit(tmp_path: Path) -> None:
    source = gpt2()
    source.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 1
    with lohan.empty():
        model = GPT2LMHeadModel(GPT2Config(**GPT2, **IDS))
    assert all(p.is_meta for p in model.parameters())
    model = lohan.wrap(model, store=tmp_path / "store", weights=tmp_path / "weights")
    assert model.lm_head.weight is model.transformer.wte.weight, "tied parameters stay tied"
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    batch = torch.arange(16).reshape(1, 16)
    model.eval()
    source.eval()
    with torch.no_grad():
        assert torch.equal(model(batch).logits, source(batch).logits)
    model.lohan.close()


def fp16_master(layer: nn.Module) -> torch.Tensor:
    """The first unit's masters, as they are in the store, padding included."""
    master = torch.empty(inside(layer).layout.units[0].elements)
    with inside(layer).exclusive([]) as store:
        residual = inside(layer).extents.units[0].residual
        store.read(residual, 0, master.data_ptr(), master.numel() * 4)
    return master


def test_fp32_files_keep_every_bit_of_a_bf16_model_s_master(tmp_path: Path) -> None:
    values = torch.randn(40, 24)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    with lohan.empty():
        layer = nn.Linear(24, 40, bias=False).to(torch.bfloat16)
    layer = lohan.wrap(layer, store=tmp_path / "s", weights=tmp_path)
    session = inside(layer)
    places = session.extents.units[0]
    count = session.layout.units[0].elements
    with session.exclusive([]) as store:
        param = torch.empty(count, dtype=torch.bfloat16)
        residual = torch.empty(count, dtype=torch.int16)
        store.read(places.param, 0, param.data_ptr(), count * 2)
        store.read(places.residual, 0, residual.data_ptr(), count * 2)
    master = torch.empty(count)
    _core.adam_join(param.data_ptr(), residual.data_ptr(), master.data_ptr(), count)
    assert torch.equal(master[: values.numel()].reshape(values.shape), values)
    layer.lohan.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_fp16_model_s_master_has_every_bit_of_what_it_is_given(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    values = torch.randn(40, 24).to(dtype)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    with lohan.empty():
        layer = nn.Linear(24, 40, bias=False).half()
    layer = lohan.wrap(layer, store=tmp_path / "s", weights=tmp_path)
    assert torch.equal(fp16_master(layer)[: values.numel()].reshape(40, 24), values.float())
    assert torch.equal(layer.state_dict()["weight"], values.float().half())
    for given in (values + 1, (values + 2).half()):
        layer.load_state_dict({"weight": given})
        assert torch.equal(fp16_master(layer)[: values.numel()].reshape(40, 24), given.float())
        assert torch.equal(layer.state_dict()["weight"], given.float().half())
    with torch.no_grad():
        for _, param in layer.named_parameters():
            param.mul_(0.5)
    halved = layer.state_dict()["weight"]
    assert torch.equal(halved, given.float().half() * 0.5)
    assert torch.equal(fp16_master(layer)[: values.numel()].reshape(40, 24), halved.float())
    layer.lohan.close()


def test_the_masters_of_a_wrapped_fp16_model_are_its_values(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -0.0, 6e-8, 65504.0]]).half()
    layer = nn.Linear(4, 1, bias=False).half()
    layer.weight.data = values.clone()
    layer = lohan.wrap(layer, store=tmp_path / "s")
    master = fp16_master(layer)
    assert torch.equal(master[:4].view(torch.int32), values[0].float().view(torch.int32))
    assert not master[4:].any(), "padding"
    layer.lohan.close()


def test_a_model_initialises_itself_block_by_block(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=96,
        **IDS,
    )
    with lohan.empty():
        model = LlamaForCausalLM(config)
    model = lohan.wrap(model, store=tmp_path / "s", init="model", lr=1e-2)
    state = model.state_dict()
    assert torch.equal(state["model.norm.weight"], torch.ones(32))
    spread = state["model.layers.1.mlp.up_proj.weight"].std()
    assert 0.5 * config.initializer_range < spread < 2 * config.initializer_range
    batch = torch.arange(24).reshape(2, 12)
    losses = []
    for _ in range(6):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.lohan.close()


def test_a_function_initialises_what_the_model_does_not(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with lohan.empty():
        model = nn.Sequential(Scale(), nn.Linear(5, 5))
    with pytest.raises(ModelError, match=r"0\.scale has no initialisation in Scale"):
        lohan.wrap(model, store=tmp_path / "a", init="model")
    with lohan.empty():
        model = nn.Sequential(Scale(), nn.Linear(5, 5))

    def fill(module: nn.Module) -> None:
        for tensor in module._parameters.values():
            if tensor is not None:
                nn.init.constant_(tensor, 0.25)

    model = lohan.wrap(model, store=tmp_path / "b", init=fill)
    assert all(bool((v == 0.25).all()) for v in model.state_dict().values())
    model.lohan.close()


def test_defaults_are_drawn_only_for_what_a_function_leaves_unset(tmp_path: Path) -> None:
    drawn: list[str] = []

    class Recorded(nn.Linear):
        def reset_parameters(self) -> None:
            drawn.append(self.name if hasattr(self, "name") else "")
            super().reset_parameters()

    def fill(module: nn.Module) -> None:
        if not isinstance(module, Recorded):
            return
        if module.name == "whole":
            module.weight.fill_(2.0)
            module.bias.fill_(3.0)
        elif module.name == "bias":
            module.bias.fill_(3.0)
        elif module.name == "scaled":
            module.weight.mul_(0.0).add_(1.0)

    with lohan.empty():
        model = nn.Sequential(*(Recorded(5, 5) for _ in range(3)))
    for module, name in zip(model, ("whole", "bias", "scaled"), strict=True):
        module.name = name
    drawn.clear()
    model = lohan.wrap(model, store=tmp_path / "s", init=fill)
    state = model.state_dict()
    model.lohan.close()
    assert drawn == ["bias", "scaled"]
    assert bool((state["0.weight"] == 2).all()) and bool((state["0.bias"] == 3).all())
    assert state["1.weight"].std() > 0 and bool((state["1.bias"] == 3).all())
    assert bool((state["2.weight"] == 1).all()) and state["2.bias"].std() > 0


def test_what_has_no_value_is_named(tmp_path: Path) -> None:
    with lohan.empty():
        model = nn.Linear(4, 4)
    with pytest.raises(ModelError, match="no storage"):
        lohan.wrap(model, store=tmp_path / "a")
    save_file({"weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no value for 1 parameters"):
        lohan.wrap(model, store=tmp_path / "b", weights=tmp_path)
    with lohan.empty():
        model = nn.Linear(4, 5)
    with pytest.raises(ModelError, match=r"\[4, 4\], but the model has"):
        lohan.wrap(model, store=tmp_path / "c", weights=tmp_path)
    with pytest.raises(StoreError, match=r"no such folder"):
        lohan.wrap(model, store=tmp_path / "d", weights=tmp_path / "nothing")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "x.safetensors").write_bytes(b"\xff" * 100)
    with lohan.empty():
        model = nn.Linear(4, 5)
    with pytest.raises(StoreError, match="too few"):
        lohan.wrap(model, store=tmp_path / "e", weights=tmp_path / "cut")


def test_an_error_without_an_errno_is_its_message_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.safetensors").write_bytes(struct.pack("<Q", 2) + b"{]" + bytes(8))
    lohan.wrap(nn.Linear(4, 4), store=tmp_path / "store").lohan.close()
    with lohan.empty():
        empty = nn.Linear(4, 4)
    calls = {
        "resume=True needs": lambda: lohan.wrap(nn.Linear(4, 4), resume=True),
        "weights=": lambda: lohan.wrap(empty, store=tmp_path / "a", weights=tmp_path / "none"),
        f"{tmp_path}": lambda: lohan.wrap(empty, store=tmp_path / "a", weights=tmp_path / "other"),
        "the store belongs to": lambda: lohan.wrap(
            nn.Linear(4, 5), store=tmp_path / "store", resume=True
        ),
    }
    for begin, call in calls.items():
        with pytest.raises(StoreError) as caught:
            call()
        assert str(caught.value).startswith(begin)
        assert caught.value.errno is None


def test_no_error_is_raised_with_an_invalid_errno() -> None:
    folder = Path(lohan.__file__).parent
    by_hand = re.compile(r"\w+Error\(\s*0,")
    found = [p.name for p in folder.glob("*.py") if by_hand.search(p.read_text(encoding="utf-8"))]
    assert not found


def test_an_empty_model_continues_from_a_store(tmp_path: Path) -> None:
    batch = torch.arange(16).reshape(1, 16)
    model = lohan.wrap(gpt2(), store=tmp_path / "store")
    model(input_ids=batch, labels=batch).loss.backward()
    model.optimizer.step()
    expected = model.state_dict()
    model.lohan.close()
    with lohan.empty():
        again = GPT2LMHeadModel(GPT2Config(**GPT2, **IDS))
    again = lohan.wrap(again, store=tmp_path / "store", resume=True)
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    again(input_ids=batch, labels=batch).loss.backward()
    again.optimizer.step()
    assert again.lohan.step == 2
    again.lohan.close()


def test_tied_names_share_one_tensor_in_a_state_dict(tmp_path: Path) -> None:
    model = lohan.wrap(gpt2(), store=tmp_path / "store", lr=1e-2)
    kept: dict[str, torch.Tensor] = {}
    batch = torch.arange(16).reshape(1, 16)
    # the same dict is filled twice, the second time with the values at that time
    for _ in range(2):
        state = model.state_dict(destination=kept)
        places = [state[name].data_ptr() for name in ("lm_head.weight", "transformer.wte.weight")]
        assert places[0] == places[1]
        assert len({v.data_ptr() for v in state.values()}) == len(state) - 1
        assert torch.equal(state["lm_head.weight"], model.lm_head.state_dict()["weight"])
        model(input_ids=batch, labels=batch).loss.backward()
        model.optimizer.step()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(model.state_dict()) - 1
    kept.clear()
    model.lm_head.state_dict(destination=kept)  # the dict object had a whole model's names before
    kept.clear()
    model.state_dict(destination=kept)
    assert kept["lm_head.weight"] is kept["transformer.wte.weight"]
    model.lm_head.state_dict(destination=kept, prefix="lm_head.")
    assert torch.equal(kept["lm_head.weight"], model.state_dict()["lm_head.weight"])
    model.lohan.close()


def test_unwrap_gives_a_plain_model_back(tmp_path: Path) -> None:
    model = lohan.wrap(gpt2(), store=tmp_path / "s", lr=1e-2)
    batch = torch.arange(16).reshape(1, 16)
    model(input_ids=batch, labels=batch).loss.backward()
    model.optimizer.step()
    expected = model.state_dict()
    plain = lohan.unwrap(model)
    assert plain is model
    assert not hasattr(plain, "lohan")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name]), name
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    assert any(not torch.equal(v, expected[k]) for k, v in plain.state_dict().items())


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_model_whose_session_is_closed_can_be_unwrapped(is_adopted: bool, tmp_path: Path) -> None:
    model = gpt2()
    origin = torch.optim.AdamW(model.parameters(), lr=1e-2) if is_adopted else None
    lohan.wrap(model, store=tmp_path / "store", optimizer=origin)
    batch = torch.arange(16).reshape(1, 16)
    model(input_ids=batch, labels=batch).loss.backward()
    model.optimizer.step()
    expected = model.state_dict()
    model.lohan.close()
    with pytest.raises(SessionError, match=r"lohan\.unwrap\(model\)"):
        model.state_dict()
    assert lohan.unwrap(model) is model
    assert not hasattr(model, "lohan")
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    if origin is not None:
        assert origin.state[model.lm_head.weight]["exp_avg"].any()
    again = lohan.wrap(model, store=tmp_path / "store", resume=True)
    assert again.lohan.step == 1
    again.lohan.close()


def test_a_closed_session_whose_store_is_gone_says_where_it_was(tmp_path: Path) -> None:
    model = lohan.wrap(nn.Linear(4, 4), store=tmp_path / "store")
    model.lohan.close()
    (tmp_path / "store" / "lohan.data").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=str(tmp_path / "store")):
        lohan.unwrap(model)
    (tmp_path / "elsewhere").rename(tmp_path / "store" / "lohan.data")
    assert lohan.unwrap(model).weight.isfinite().all()
    model = lohan.wrap(nn.Linear(4, 4))
    model.lohan.close()
    with pytest.raises(StoreError, match="temporary"):
        lohan.unwrap(model)
