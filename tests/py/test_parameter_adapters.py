"""LoRA on single parameters (target_parameters=), such as the fused experts of transformers 5."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import kit as helper
import lohan
import pytest
import test_experts_apart as experts
import test_gpt_oss
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LR = 1e-2


def adapted(model: Any, *targets: str, **settings: Any) -> Any:
    settings = {"target_modules": ["q_proj"], **settings}
    config = LoraConfig(r=2, target_parameters=[*(targets or EXPERTS)], **settings)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config).train()


def train(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        loss = helper.language_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(model: Any) -> list[float]:
    params = [param for param in model.parameters() if param.requires_grad]
    return train(model, torch.optim.AdamW(params, lr=LR))


def same(found: list[float], wanted: list[float]) -> bool:
    """Compare losses: lohan's AdamW rounds differently than torch's."""
    return found[0] == wanted[0] and found == pytest.approx(wanted, rel=1e-6)


def base(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return experts.MODELS[name]().to(dtype)


SLOW = pytest.mark.slow
KINDS = [
    pytest.param(name, kind, apart, marks=[] if (name, kind) == ("qwen", "empty") else SLOW)
    for name in ("qwen", "mixtral", "gpt_oss", "deepseek")
    for kind in ("memory", "empty")
    for apart in ("together", "apart")
]


@pytest.mark.parametrize(("name", "kind", "apart"), KINDS)
def test_experts_are_adapted_with_the_losses_of_peft(
    name: str, kind: str, apart: str, store_dir: pathlib.Path
) -> None:
    wanted = plain(adapted(base(name)))
    settings: dict[str, Any] = {"store": store_dir / "store", "lr": LR, "experts": apart}
    model = base(name)
    if kind == "empty":
        model.save_pretrained(store_dir / "files", max_shard_size="200KB")
        with lohan.empty():
            model = experts.MODELS[name]()
        settings["weights"] = store_dir / "files"
    model = lohan.wrap(adapted(model), **settings)
    assert same(train(model, model.optimizer), wanted)
    model.lohan.close()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"activations": "keep"}, marks=SLOW),
        {"activations": "recompute"},
        pytest.param({"activations": "auto"}, marks=SLOW),
        pytest.param({"device": "emu"}, marks=SLOW),
    ],
    ids=lambda more: next(iter(more.values())),
)
@pytest.mark.parametrize("apart", ["together", "apart"])
def test_a_small_budget_and_recomputation_change_nothing(
    more: dict[str, Any], apart: str, store_dir: pathlib.Path
) -> None:
    settings: dict[str, Any] = {"lr": LR, "experts": apart}
    host = helper.host_bytes_min(adapted(base("qwen")), store_dir / "least", **settings, **more)
    losses = []
    for number, some in enumerate(({}, {"host_bytes": host, **more})):
        model = lohan.wrap(adapted(base("qwen")), store=store_dir / f"{number}", **settings, **some)
        losses.append(train(model, model.optimizer))
        model.lohan.close()
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["together", "apart"])
def test_experts_in_bf16_and_packed_ones_are_adapted(apart: str, store_dir: pathlib.Path) -> None:
    packed, decoded = test_gpt_oss.save(store_dir / "bases")
    kind = AutoModelForCausalLM
    settings: dict[str, Any] = {"experts_implementation": "eager", "dtype": torch.bfloat16}
    wanted = plain(adapted(kind.from_pretrained(decoded, **settings)))
    with lohan.empty():
        config = test_gpt_oss.GptOssConfig.from_pretrained(decoded)
        model = kind.from_config(config, **settings)
    model = lohan.wrap(
        adapted(model), weights=packed, store=store_dir / "store", lr=LR, experts=apart
    )
    found = train(model, model.optimizer)
    assert found[0] == wanted[0] and found == pytest.approx(wanted, rel=1e-2)
    model.lohan.close()


@pytest.mark.parametrize("target", [pytest.param("q_proj.weight", marks=SLOW), "lm_head.weight"])
def test_a_parameter_of_a_layer_is_adapted(target: str, store_dir: pathlib.Path) -> None:
    wanted = plain(adapted(base("qwen"), target, target_modules=["v_proj"]))
    model = adapted(base("qwen"), target, target_modules=["v_proj"])
    model = lohan.wrap(model, store=store_dir / "store", lr=LR)
    assert same(train(model, model.optimizer), wanted)
    model.lohan.close()


@pytest.mark.parametrize("apart", [pytest.param("together", marks=SLOW), "apart"])
def test_adapters_are_saved_resumed_disabled_unwrapped_and_merged(
    apart: str, store_dir: pathlib.Path
) -> None:
    settings: dict[str, Any] = {"store": store_dir / "store", "experts": apart}
    model = lohan.wrap(adapted(base("qwen")), lr=LR, **settings)
    train(model, model.optimizer)
    loss = helper.language_loss(model.eval(), 0).item()
    model.save_pretrained(store_dir / "adapter")
    with model.disable_adapter():
        assert helper.language_loss(model, 0).item() == helper.language_loss(base("qwen"), 0).item()
    model.lohan.close()
    resumed = lohan.wrap(adapted(base("qwen")), **settings, resume=True).eval()
    assert helper.language_loss(resumed, 0).item() == loss
    own = lohan.unwrap(resumed)
    assert not any("_activate_lora" in vars(module) for module in own.modules())
    assert helper.language_loss(own, 0).item() == loss
    again = PeftModel.from_pretrained(base("qwen"), str(store_dir / "adapter")).eval()
    assert helper.language_loss(again, 0).item() == loss
    merged = own.merge_and_unload()
    assert helper.language_loss(merged, 0).item() == pytest.approx(loss, rel=1e-5)


def test_a_write_to_an_adapted_parameter_in_a_forward_is_still_noticed(
    store_dir: pathlib.Path,
) -> None:
    model = adapted(base("qwen"))
    module = model.get_submodule("base_model.model.model.layers.0.mlp.experts").get_base_layer()
    plain_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            module.parametrizations.gate_up_proj.original.add_(1)
        return plain_forward(*args, **kwargs)

    module.forward = forward
    model = lohan.wrap(model, store=store_dir / "store", lr=LR)
    with pytest.raises(lohan.LohanError, match=r"gate_up_proj.*changed in place"):
        helper.language_loss(model, 0).backward()
    model.lohan.close()
