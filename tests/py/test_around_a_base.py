"""What libraries and scripts put around a base that is not in memory: heads, EVA, diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lohan
import pytest
import test_diffusion_models as diffusion
import test_loader_names as loader
import test_peft_methods as methods
import torch
from diffusion_helper import FAMILIES, build, halve
from lohan.errors import HollowParameterError, ModelError
from peft import (
    EvaConfig,
    LoraConfig,
    get_eva_state_dict,
    get_peft_model,
    initialize_lora_eva_weights,
)
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS = methods.TOKENS


class WithValue(nn.Module):
    """A model with a head for values, as TRL's AutoModelForCausalLMWithValueHead is built."""

    def __init__(self, model: Any, width: int) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Sequential()
        self.v_head.summary = nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and values."""
        found = self.pretrained_model(input_ids=tokens, output_hidden_states=True)
        return found.logits, self.v_head(found.hidden_states[-1])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**methods.CONFIG)).save_pretrained(folder)
    return folder


def lora(model: Any) -> Any:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_value_head_around_a_model_trains_as_with_torch(
    name: str, is_adapted: bool, base: Path, store_dir: Path
) -> None:
    folder, width = base, 32
    if name == "mixtral":  # whose tensors the loader renames and merges
        folder, width = store_dir / "mixtral", 64
        loader.disturbed(loader.mixtral).save_pretrained(folder)

    def around(model: Any) -> Any:
        torch.manual_seed(1)
        return WithValue(lora(model) if is_adapted else model, width).train()

    def train(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(3):
            logits, value = model(TOKENS)
            loss = logits.square().mean() + (value - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = around(AutoModelForCausalLM.from_pretrained(folder))
    params = [param for param in plain.parameters() if param.requires_grad]
    wanted = train(plain, torch.optim.AdamW(params, lr=1e-2))
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(plain.pretrained_model.config)
    model = lohan.wrap(around(model), weights=folder, store=store_dir / "store", lr=1e-2)
    kinds = {name: origin.kind for name, origin in model.lohan.origins().items()}
    assert {kinds.pop(f"v_head.summary.{own}") for own in ("weight", "bias")} == {"memory"}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {"file"}
    assert methods.same(train(model, model.optimizer), wanted)
    model.lohan.close()


def test_of_two_models_in_a_module_neither_is_guessed(base: Path, store_dir: Path) -> None:
    with lohan.empty():
        config = LlamaConfig.from_pretrained(base)
        model = nn.ModuleDict({n: AutoModelForCausalLM.from_config(config) for n in ("a", "b")})
    with pytest.raises(ModelError, match=r"has no value for 42 parameters \('a\.model\."):
        lohan.wrap(model, weights=base, store=store_dir / "store")


EVA: list[dict[str, Any]] = [{"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}] * 6


def for_eva(model: Any) -> Any:
    torch.manual_seed(7)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=methods.LINEAR,
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=2.0),
    )
    return get_peft_model(model, config)


def eva(model: Any, function: Any = initialize_lora_eva_weights) -> Any:
    torch.manual_seed(8)
    return function(model, EVA, show_progress_bar=False)


def test_eva_is_computed_on_a_base_in_memory_or_on_a_wrapped_one(
    base: Path, store_dir: Path
) -> None:
    model = for_eva(methods.in_memory(base))
    eva(model)
    wanted = methods.plain(model)
    model = for_eva(methods.in_memory(base))
    eva(model)
    assert methods.same(methods.wrapped(model, store_dir / "a", weights=base), wanted)
    with pytest.raises(ModelError, match=r"empty parameter .*EVA"):
        eva(for_eva(methods.empty(base)))
    model = lohan.wrap(for_eva(methods.empty(base)), weights=base, store=store_dir / "b")
    with pytest.raises(HollowParameterError, match=r"lora_A\.default\.weight"):
        eva(model)
    found = eva(model, get_eva_state_dict)
    model.lohan.close()
    model = for_eva(methods.empty(base))
    initialize_lora_eva_weights(model, eva_state_dict=found)
    assert methods.same(methods.wrapped(model, store_dir / "c", weights=base), wanted)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_diffusers_loads_adapters_onto_an_empty_base(
    low_cpu_mem_usage: bool, is_inside: bool, store_dir: Path
) -> None:
    name = "flux"
    path = diffusion.single_file(name, store_dir)
    trained = build(name, "lora")
    with torch.no_grad():
        for key, param in trained.named_parameters():
            if "lora_" in key:
                param.add_(torch.randn_like(param) * 0.05)
    trained.save_lora_adapter(store_dir / "adapters")

    def load(model: Any) -> Any:
        how: Any = {"weight_name": diffusion.ADAPTERS, "low_cpu_mem_usage": low_cpu_mem_usage}
        model.load_lora_adapter(store_dir / "adapters", prefix=None, **how)
        return model

    plain = build(name, "bf16")
    plain.load_state_dict(load_file(path))
    wanted = diffusion.output(load(plain), name)
    with lohan.empty():
        model = FAMILIES[name].build()
        halve(model)
        model = load(model) if is_inside else model
    model = model if is_inside else load(model)
    model = lohan.wrap(model, weights=path, store=store_dir / "run")
    assert torch.equal(diffusion.output(model, name), wanted)
    origins = model.lohan.origins()
    assert {o.kind for n, o in origins.items() if "lora_" in n} == {"memory"}
    model.lohan.close()
