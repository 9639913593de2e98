"""Experts that transformers keeps in one parameter, each as a block of its own."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from experts_helper import EXPERTS, HYPER, SIZES, Zipf, loss_of, qwen
from lohan.common._inside import inside
from lohan.errors import (
    BudgetError,
    FrozenParameterError,
    ModelError,
    SessionError,
    UnsupportedError,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

STEPS = range(4)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS))


def gpt_oss() -> nn.Module:
    """Return a model whose experts have biases and transposed weights."""
    made = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=8))
    with torch.no_grad():
        for name, param in made.named_parameters():
            if name.endswith("_bias"):
                param.normal_()
    return made


def deepseek() -> nn.Module:
    """Return a model with a dense layer, and experts that every token uses."""
    sizes = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 32}
    del sizes["head_dim"]
    config = DeepseekV3Config(
        **sizes,
        n_routed_experts=EXPERTS,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    return DeepseekV3ForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen": qwen,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "deepseek": deepseek,
}


def lora(model: nn.Module, *targets: str) -> Any:
    torch.manual_seed(1)
    names = [*(targets or ("o_proj",))]
    config = LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config).train()


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return lora(MODELS[name]().to(dtype))


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: v.clone() for name, v in model.state_dict().items() if "lora_" in name}


@functools.cache
def in_memory(name: str, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with torch's own forward and backward and lohan's kernel."""
    model = build(name, dtype)
    trained = [param for param in model.parameters() if param.requires_grad]
    states = {param: helper.State.of(param.data) for param in trained}
    losses = []
    for step in STEPS:
        loss = loss_of(model, step)
        loss.backward()
        for param, state in states.items():
            assert param.grad is not None
            state.update(param.grad, **HYPER)
            param.grad = None
        losses.append(loss.item())
    return losses, adapters(model)


def checkpointed(model: Any) -> None:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "least": {"host_bytes": "least"},
    "emulated": {"host_bytes": "least", "device": "emu"},
    "deferred": {"host_bytes": "least", "schedule": "deferred"},
    "recompute": {"activations": "recompute"},
    "checkpointed": {},
}


@pytest.mark.parametrize(
    ("name", "setting", "dtype"),
    [
        *(("qwen", setting, torch.bfloat16) for setting in SETTINGS),
        *((name, "least", torch.float32) for name in MODELS),
    ],
    ids=str,
)
def test_training_has_the_bits_of_torch_with_eager_experts(
    name: str, setting: str, dtype: torch.dtype, store_dir: pathlib.Path
) -> None:
    losses, expected = in_memory(name, dtype)
    settings = {**SETTINGS[setting], "experts": "apart"}
    if settings.get("host_bytes") == "least":
        del settings["host_bytes"]
        settings["host_bytes"] = helper.host_bytes_min(build(name, dtype), store_dir, **settings)
    model = build(name, dtype)
    if setting == "checkpointed":
        checkpointed(model)
    model = lohan.wrap(model, store=store_dir / "run", **HYPER, **settings)
    experts = {unit.name for unit in inside(model).layout.units if ".experts." in unit.name}
    assert len(experts) % EXPERTS == 0 and experts
    assert helper.losses(model, STEPS, loss_of) == losses
    helper.assert_same_state(adapters(model), expected)
    model.lohan.flush()
    stats = model.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    model.lohan.close()


def test_a_step_reads_the_experts_that_were_routed_to_twice_and_no_others(
    store_dir: pathlib.Path,
) -> None:
    """The window is an eighth of a layer or less, so nothing stays from forward to backward."""
    torch.manual_seed(0)
    made: Any = lora(qwen(128, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=3))
    routers = []
    for number, layer in enumerate(made.base_model.model.model.layers):
        layer.mlp.gate = Zipf(layer.mlp.gate, number)
        routers.append(layer.mlp.gate)
    settings: dict[str, Any] = {"experts": "apart", "device": "cpu"}
    settings["host_bytes"] = helper.host_bytes_min(made, store_dir, **settings)
    model = lohan.wrap(made, store=store_dir / "run", **HYPER, **settings)
    units = inside(model).layout.units
    expert = next(unit.nbytes for unit in units if ".experts." in unit.name)
    dense = sum(unit.nbytes for unit in units if ".experts." not in unit.name)
    assert inside(model).budget["region_bytes"] <= 128 * expert / 8
    batch = torch.randint(0, helper.VOCABULARY, (2, 16))
    shares = []
    for step in range(6):
        model(input_ids=batch, labels=batch).loss.backward()
        model.optimizer.step()
        model.lohan.flush()
        stats = model.lohan.stats()
        touched = 2 * sum(router.hits() for router in routers) * expert
        assert stats.bytes == stats.planned_bytes
        if step > 0:  # the order of the other blocks is known
            assert stats.replans == 0
            shares.append(stats.bytes["param_read"] / (touched + 2 * dense))
            assert touched < 2 * 0.6 * 3 * 128 * expert
    model.lohan.close()
    assert max(shares) <= 1.02, shares


def bare(dtype: torch.dtype = torch.bfloat16, experts: int = EXPERTS) -> Any:
    torch.manual_seed(0)
    return qwen(experts).to(dtype)


def saved(folder: pathlib.Path, *, is_fused: bool) -> pathlib.Path:
    size = "200KB" if is_fused else "1GB"
    bare().save_pretrained(folder, save_original_format=not is_fused, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == is_fused
    return folder


@pytest.mark.parametrize("frozen", ["in_place", "copy"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "apart in the files"])
def test_experts_are_read_from_the_users_files(
    is_fused: bool, frozen: str, store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(store_dir / "base", is_fused=is_fused)
    losses, expected = in_memory("qwen", torch.bfloat16)
    settings: dict[str, Any] = {"weights": folder, "frozen": frozen, "experts": "apart"}
    made = build("qwen", torch.bfloat16)
    settings["host_bytes"] = helper.host_bytes_min(made, store_dir, **settings)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "experts" in name:  # the files' values take their place
                param.zero_()
    capsys.readouterr()
    model = lohan.wrap(made, store=store_dir / "run", **HYPER, **settings)
    said = capsys.readouterr().err
    assert "not used" not in said and "keep their current" not in said, said
    units = inside(model).layout.units
    experts = [unit for unit in units if ".experts." in unit.name]
    runs = {len(unit.runs) for unit in experts}
    assert runs == ({0} if frozen == "copy" else {2} if is_fused else {1})
    assert helper.losses(model, STEPS[:2], loss_of) == losses[:2]
    model.lohan.close()
    again = {**settings, "weights": None, "resume": True}
    model = lohan.wrap(build("qwen", torch.bfloat16), store=store_dir / "run", **again)
    assert helper.losses(model, STEPS[2:], loss_of) == losses[2:]
    helper.assert_same_state(adapters(model), expected)
    model.lohan.close()


def test_a_model_without_storage_gets_its_experts_from_files(store_dir: pathlib.Path) -> None:
    folder = saved(store_dir / "base", is_fused=False)
    plain = bare()
    with lohan.empty():
        made: Any = qwen().to(torch.bfloat16)
    made.requires_grad_(False)
    made.lm_head.weight.requires_grad_(True)
    for name, buffer in plain.named_buffers():
        dict(made.named_buffers())[name].copy_(buffer)
    model = lohan.wrap(made, store=store_dir / "run", weights=folder, experts="apart")
    with torch.no_grad():
        batch = helper.tokens(0)
        assert torch.equal(model(input_ids=batch).logits, plain(input_ids=batch).logits)
    plain = lohan.unwrap(model)
    helper.assert_same_state(dict(plain.state_dict()), dict(bare().state_dict()))
    assert isinstance(plain.model.layers[0].mlp.experts.down_proj, nn.Parameter)


def test_an_expert_whose_parts_are_in_several_files_is_read_in_place(
    store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare().save_pretrained(store_dir / "whole")
    values = load_file(store_dir / "whole" / "model.safetensors")
    (store_dir / "base").mkdir()
    for number, is_up in enumerate((False, True)):
        part = {n: v for n, v in values.items() if (".experts.3.up_proj" in n) == is_up}
        save_file(part, store_dir / "base" / f"part-{number}.safetensors")
    losses, _ = in_memory("qwen", torch.bfloat16)
    made = build("qwen", torch.bfloat16)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "experts" in name:
                param.zero_()
    settings: dict[str, Any] = {"weights": store_dir / "base", "experts": "apart", **HYPER}
    model = lohan.wrap(made, store=store_dir / "run", **settings)
    assert "copied into the store" not in capsys.readouterr().err
    assert all(unit.runs for unit in inside(model).layout.units if not unit.trainable)
    assert helper.losses(model, STEPS[:2], loss_of) == losses[:2]
    model.lohan.close()


def test_an_expert_that_the_files_have_in_part_is_missing(store_dir: pathlib.Path) -> None:
    bare().save_pretrained(store_dir / "base")
    path = store_dir / "base" / "model.safetensors"
    values = load_file(path)
    save_file({n: v for n, v in values.items() if ".1.mlp.experts.3.up" not in n}, path)
    with lohan.empty():
        made: Any = qwen().to(torch.bfloat16).requires_grad_(False)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.gate_up_proj' of 31 tensors"):
        lohan.wrap(made, store=store_dir / "run", weights=store_dir / "base", experts="apart")


def test_names_outside_of_the_session_are_those_of_the_fused_model(
    store_dir: pathlib.Path,
) -> None:
    plain = build("qwen", torch.bfloat16)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    plain.base_model.model.save_pretrained(store_dir / "expected")
    whole = plain.base_model.model.model.layers[1].mlp.experts.down_proj
    model: Any = lohan.wrap(plain, store=store_dir / "run", experts="apart")
    assert whole.untyped_storage().nbytes() == whole.element_size()
    found = model.state_dict()
    assert list(found) == list(expected)
    helper.assert_same_state(dict(found), expected)
    assert str(model.load_state_dict(found)) == "<All keys matched successfully>"
    layer = model.base_model.model.model.layers[1].mlp.experts
    assert [*layer.state_dict()] == ["gate_up_proj", "down_proj"]
    assert str(layer.load_state_dict(layer.state_dict())) == "<All keys matched successfully>"
    changed = {
        **found,
        "base_model.model.model.layers.1.mlp.experts.down_proj": found[
            "base_model.model.model.layers.1.mlp.experts.down_proj"
        ]
        + 1,
    }
    with pytest.raises(FrozenParameterError, match=r"layers\.1\.mlp\.experts\.0\.down_proj"):
        model.load_state_dict(changed)
    model.save_pretrained(store_dir / "adapters")
    assert all("lora_" in k for k in load_file(store_dir / "adapters/adapter_model.safetensors"))
    model.base_model.model.save_pretrained(store_dir / "saved")
    helper.assert_same_state(
        load_file(store_dir / "saved/model.safetensors"),
        load_file(store_dir / "expected/model.safetensors"),
    )
    with pytest.raises(UnsupportedError, match="save_pretrained"):
        lohan.export(model, store_dir / "exported")
    plain = lohan.unwrap(model)
    helper.assert_same_state(dict(plain.state_dict()), expected)
    assert list(plain.state_dict()) == list(expected)
    assert plain.base_model.model.model.layers[1].mlp.experts.down_proj is whole
    assert "forward" not in plain.base_model.model.model.layers[1].mlp.experts.__dict__


def test_an_evaluation_and_a_closed_session(store_dir: pathlib.Path) -> None:
    plain = build("qwen").eval()
    batch = helper.tokens(0)
    with torch.no_grad():
        expected = plain(input_ids=batch).logits
    model = lohan.wrap(plain, store=store_dir / "run", experts="apart")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(input_ids=batch).logits, expected)
    model.lohan.close()
    with pytest.raises(SessionError):
        model(input_ids=batch)
    with torch.no_grad():
        assert torch.equal(lohan.unwrap(model)(input_ids=batch).logits, expected)


@pytest.mark.parametrize(
    ("settings", "what", "kind"),
    [
        ({"experts": "each"}, "must be 'together' or 'apart'", ModelError),
        ({"method": "mezo", "idle": "skip"}, "change every parameter", UnsupportedError),
        ({"host_bytes": 1}, "at least", BudgetError),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(
    settings: dict[str, Any], what: str, kind: type, store_dir: pathlib.Path
) -> None:
    model = build("qwen")
    before = dict(model.named_parameters())
    with pytest.raises(kind, match=what):
        lohan.wrap(model, store=store_dir / "run", **{"experts": "apart", **settings})
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is param for name, param in before.items())
    assert torch.isfinite(loss_of(model, 0))


def test_models_without_fused_experts_are_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="blocks="):
        lohan.wrap(helper.llama(), store=store_dir / "run", experts="apart")


def test_without_the_setting_nothing_changes(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build("qwen"), store=store_dir / "run")
    layer = model.base_model.model.model.layers[0].mlp.experts
    assert not inside(model).apart.splits and "apart" not in vars(inside(model))
    assert "forward" not in vars(layer) and not list(layer.children())[1:]
    model.lohan.close()
