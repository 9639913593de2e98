"""Mixtures of experts: who was not routed to is left alone, and need not even be read."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.common._inside import inside
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
)

STEPS = range(6)
EXPERTS = 8
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 1,
    "vocab_size": helper.VOCABULARY,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))


def qwen() -> nn.Module:
    sizes = {"moe_intermediate_size": 48, "num_experts": EXPERTS, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


def switch() -> nn.Module:
    """Return a model whose experts are modules, each with its own parameters."""
    config = SwitchTransformersConfig(
        vocab_size=helper.VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=EXPERTS,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return SwitchTransformersForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"mixtral": mixtral, "qwen": qwen, "switch": switch}


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).train()
    for module in model.modules():
        if isinstance(module, SwitchTransformersTop1Router):
            # its forward does this, which a wrapped model refuses at the start
            module.classifier.float()
    return model


def few_tokens_loss(model: nn.Module, step: int) -> torch.Tensor:
    """So few that there are experts without any."""
    batch = helper.tokens(step)[:, :2].contiguous()
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def idle(gradients: dict[str, torch.Tensor | None]) -> int:
    """Count the experts without gradients, in one tensor or as separate modules."""
    count = 0
    for name, gradient in gradients.items():
        if "experts" in name and gradient is None:
            count += 1
        elif name.endswith("experts.down_proj") and gradient is not None:
            count += int((gradient.flatten(1) == 0).all(1).sum())
    return count


def train_plainly(model: nn.Module) -> tuple[helper.Trained, int]:
    """Train with torch's backward and lohan's kernel; return how many experts were idle."""
    states = {param: helper.State.of(param.data) for param in model.parameters()}
    losses, count = [], 0
    for step in STEPS:
        loss = few_tokens_loss(model, step)
        loss.backward()
        count += idle({name: param.grad for name, param in model.named_parameters()})
        for param, state in states.items():
            if param.grad is not None:
                state.update(param.grad)
            param.grad = None
        losses.append(loss.item())
    return helper.Trained(losses, model.state_dict()), count


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("host_bytes", ["minimal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_kernel_applied_to_the_gradients_that_routing_left(
    name: str, dtype: torch.dtype, host_bytes: str, device: str, store_dir: pathlib.Path
) -> None:
    expected, idle_count = train_plainly(build(name, dtype))
    assert idle_count > 0
    settings: dict[str, Any] = {"device": device, **helper.HYPER}
    if host_bytes == "minimal":
        settings["host_bytes"] = helper.host_bytes_min(build(name, dtype), store_dir, device=device)
    model = lohan.wrap(build(name, dtype), store=store_dir / "run", **settings)
    helper.assert_same(helper.train(model, STEPS, few_tokens_loss), expected)


WIDTH = 128
LAYERS = 3


class Layer(nn.Module):
    """A layer of experts; the batch decides which of them are used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, routed: list[int]) -> torch.Tensor:
        y = self.norm(x)
        return x + torch.stack([torch.tanh(self.experts[i](y)) for i in routed]).mean(0)


class Mixture(nn.Module):
    """A model with layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, routed: list[int]) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, routed)
        return x.square().mean()

    def experts(self) -> list[nn.Module]:
        return [expert for layer in self.layers for expert in layer.experts]


def step_of(model: nn.Module, step: int, routed: list[int]) -> Any:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    model(x, routed).backward()
    model.optimizer.step()
    model.lohan.flush()
    return model.lohan.stats()


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_of_experts_that_are_given_as_blocks_only_those_routed_to_are_read_and_written(
    schedule: str, store_dir: pathlib.Path
) -> None:
    made = Mixture()
    settings: dict[str, Any] = {"schedule": schedule, "blocks": made.experts()}
    settings["host_bytes"] = helper.host_bytes_min(made, store_dir, **settings)
    model = lohan.wrap(made, store=store_dir / "run", **settings)
    units = {unit.name: unit for unit in inside(model).layout.units}
    expert, norm = units["layers.0.experts.0"].nbytes, units["layers.0.norm"].nbytes
    assert len(units) == LAYERS * (EXPERTS + 1)
    for step in range(2):
        step_of(model, step, [*range(EXPERTS)])
    before = dict(model.state_dict())
    last, routes = [*range(EXPERTS)], [[5], [5], [1, 6], [1, 6], [5]]
    for step, routed in enumerate(routes, start=2):
        moved = step_of(model, step, routed).bytes
        used = LAYERS * (len(routed) * expert + norm)
        assert moved["param_write"] == used and moved["state_write"] == 2 * used
        if routed == last:  # otherwise the last step's experts are read ahead, some of them in vain
            assert moved["state_read"] == 2 * used
            assert moved["param_read"] < LAYERS * EXPERTS * expert
        last = routed
    after = dict(model.state_dict())
    model.lohan.close()
    for name, value in before.items():
        is_used = "norm" in name or name.split(".")[3] in ("1", "5", "6")
        assert torch.equal(after[name], value) != is_used, name
