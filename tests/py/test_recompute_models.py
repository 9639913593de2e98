"""Recomputed models of transformers and diffusers: the same bits as with kept activations."""

from __future__ import annotations

import functools
import gc
import pathlib
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from diffusers import DiTTransformer2DModel
from lohan.activations import _frame, _offloaded
from lohan.common._inside import inside
from quick_helper import half_quick
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

STEPS = range(2)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def gpt2(*, use_cache: bool = False) -> nn.Module:
    return helper.gpt2(n_layer=2, dropout=0.1, use_cache=use_cache)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            **SIZES,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=256,
            attention_dropout=0.1,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES, vocab_size=256, max_position_embeddings=32))


def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, vocab_size=256, decoder_start_token_id=0, use_cache=False)
    )


def vit() -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(**SIZES, **sizes))


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        dropout=0.1,
        norm_num_groups=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )


def noise_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a denoiser of images of known classes."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    noised, noise = (torch.randn(2, 4, 8, 8, generator=generator, dtype=dtype) for _ in range(2))
    times, classes = torch.tensor([step, 500]), torch.tensor([3, step])
    found = model(noised, timestep=times, class_labels=classes).sample
    return (found[:, :4] - noise).float().square().mean()


def image_loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    loss: torch.Tensor = model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "gpt2": (gpt2, helper.language_loss),
    "gpt2 with a cache": (functools.partial(gpt2, use_cache=True), helper.language_loss),
    "llama with grouped queries": (helper.llama, helper.language_loss),
    "bert": (bert, helper.language_loss),
    "t5": (t5, helper.language_loss),
    "vit": (vit, image_loss),
    "mixture of experts": (mixtral, helper.language_loss),
    "dit": (dit, noise_loss),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype).train()


@pytest.mark.parametrize(("name", "device"), half_quick(MODELS, ["cpu", "emu"]))
def test_models_train_to_the_bits_of_kept_activations_in_less_memory(
    name: str, device: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_frame, "SMALL_BYTES", 256)  # the tensors of these models are all small
    runs, kept = [], []
    dtype = torch.bfloat16 if device == "cpu" and name != "vit" else torch.float32
    for activations in ("keep", "recompute"):
        torch.manual_seed(1)
        model = lohan.wrap(
            build(name, dtype),
            store=store_dir / activations,
            activations=activations,
            device=device,
            **helper.HYPER,
        )
        if device == "emu":
            loss = MODELS[name][1](model, 0)
            kept.append(inside(model).saving.meter.kept_bytes)
            del loss
        torch.manual_seed(2)
        runs.append(helper.train(model, STEPS, MODELS[name][1]))
    helper.assert_same(runs[1], runs[0])
    assert not kept or kept[1] < 0.7 * kept[0]


def every_third_layer(model: nn.Module) -> dict[str, str]:
    """Choose every third of the modules without children in repeated blocks."""
    leaves = [
        name
        for name, module in model.named_modules()
        if not [*module.children()] and any(part.isdigit() for part in name.split("."))
    ]
    return dict.fromkeys(leaves[::3], "recompute")


@pytest.mark.parametrize("name", MODELS)
def test_models_in_which_every_third_layer_is_computed_again_train_to_the_same_bits(
    name: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_frame, "SMALL_BYTES", 256)
    runs, kept = [], []
    for again in (False, True):
        model = build(name)
        said = every_third_layer(model) if again else "keep"
        model = lohan.wrap(
            model, store=store_dir / str(again), activations=said, device="emu", **helper.HYPER
        )
        loss = MODELS[name][1](model, 0)
        kept.append(inside(model).saving.meter.kept_bytes)
        del loss
        torch.manual_seed(2)
        runs.append(helper.train(model, STEPS, MODELS[name][1]))
    helper.assert_same(runs[1], runs[0])
    # Without what is dropped, and with outputs of skipped layers, which no operation saves.
    assert kept[1] != kept[0]


@pytest.mark.parametrize("name", MODELS)
def test_models_train_under_auto_to_the_bits_of_kept_activations_in_less_memory(
    name: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_frame, "SMALL_BYTES", 256)
    monkeypatch.setattr(_offloaded, "LEAST_BYTES", 256)
    runs, plans, room = [], [], None
    for activations in ("keep", "auto"):
        model = lohan.wrap(
            build(name),
            store=store_dir / activations,
            device="emu",
            device_bytes=room,
            device_param_bytes=1 << 20,
            activations=activations,
            **({"swap_bytes": 64 << 20} if room else {}),
            **helper.HYPER,
        )
        torch.manual_seed(2)
        runs.append(helper.train(model, range(4), MODELS[name][1]))
        kept = inside(model).saving.meter.peak_bytes - inside(model).device.slot_bytes
        room = inside(model).device.slot_bytes + 3 * kept // 4
        plans.append(model.lohan.plan())
    assert plans[1].swapped_bytes > 0 or plans[1].recompute_s > 0
    helper.assert_same(runs[1], runs[0])


@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_dit_whose_attention_leaves_trains_to_the_bits_of_one_that_keeps_all(
    device: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_frame, "SMALL_BYTES", 256)
    monkeypatch.setattr(_offloaded, "LEAST_BYTES", 256)
    runs, moved = [], []
    leaving = {"*.attn1*": "swap", "*.norm*": "keep", "*": "recompute"}
    swap = {"swap_bytes": 8 << 20, "swap_ssd_bytes": 64 << 20}
    for settings in ({}, {"activations": leaving, **swap}):
        model = lohan.wrap(
            build("dit"),
            store=store_dir / str(len(runs)),
            device=device,
            **helper.HYPER,
            **settings,
        )
        torch.manual_seed(2)
        losses = [noise_loss(model, 0)]
        model.lohan.flush()  # everything that is offloaded has arrived
        losses[0].backward()
        model.optimizer.step()
        model.lohan.flush()
        moved.append(sum(n for k, n in model.lohan.stats().bytes.items() if k.startswith("saved")))
        runs.append(([losses[0].detach()], helper.train(model, STEPS, noise_loss)))
    assert torch.equal(runs[0][0][0], runs[1][0][0])
    helper.assert_same(runs[1][1], runs[0][1])
    assert moved[0] == 0 < moved[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_that_checkpoints_its_blocks_itself_trains_to_the_same_bits(
    use_reentrant: bool, store_dir: pathlib.Path
) -> None:
    runs = []
    for activations in ("keep", "recompute"):
        model = build("gpt2")
        if activations == "recompute":
            options = {"use_reentrant": use_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        torch.manual_seed(1)
        model = lohan.wrap(
            model, store=store_dir / activations, activations=activations, **helper.HYPER
        )
        runs.append(helper.train(model, STEPS, helper.language_loss))
    helper.assert_same(runs[1], runs[0])


def frames() -> list[_frame.Frame]:
    """Return all frames, which keeps alive those that earlier tests have left in tracebacks."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is _frame.Frame]


def test_a_cache_is_made_in_training_only_where_it_is_asked_for(store_dir: pathlib.Path) -> None:
    settings: dict[str, Any] = {"activations": "recompute", **helper.HYPER}
    model = lohan.wrap(gpt2(use_cache=True).train(), store=store_dir / "a", **settings)
    tokens = helper.tokens(0)
    before = frames()
    out = model(input_ids=tokens, labels=tokens)
    assert out.past_key_values is None and len(frames()) > len(before)
    del out
    assert len(frames()) == len(before), "a forward without a backward stays in memory"
    assert model(tokens, use_cache=True).past_key_values is not None
    assert len(frames()) == len(before), "the cache and the graph that it is of refer to each other"
    assert model(tokens, *[None] * 8, True).past_key_values is not None  # as a positional argument
    with torch.no_grad():
        assert model(tokens).past_key_values is not None
    assert model.eval()(tokens).past_key_values is not None
    assert model.generate(tokens[:, :4], max_new_tokens=3).shape[1] == 7
    lohan.unwrap(model)
    assert model.train()(tokens).past_key_values is not None


@pytest.mark.parametrize("name", ["t5", "llama with grouped queries"])
@pytest.mark.parametrize("way", ["call", "config", "past"])
def test_a_block_that_is_given_a_cache_is_recomputed_from_what_the_cache_was(
    name: str, way: str, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_frame, "SMALL_BYTES", 256)
    # In training, lohan leaves out a cache that only the configuration requests, but not in eval().
    is_asked = way != "config"

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        tokens, given = helper.tokens(step), {"use_cache": True} if is_asked else {}
        if way == "past":
            with torch.no_grad():
                past = model(input_ids=tokens, labels=tokens, use_cache=True).past_key_values
            given["past_key_values"] = past
        before = len(frames())
        out = model.train(is_asked)(input_ids=tokens, labels=tokens, **given)
        assert out.past_key_values is not None
        assert (len(frames()) > before) == (activations == "recompute")
        loss: torch.Tensor = out.loss
        return loss

    runs = []
    for activations in ("keep", "recompute"):
        model: Any = build(name)
        for part in (model, model.get_decoder()):  # the decoder of T5 has its own
            part.config.use_cache = not is_asked
        place = store_dir / activations
        model = lohan.wrap(model, store=place, activations=activations, **helper.HYPER)
        torch.manual_seed(2)
        runs.append(helper.train(model, STEPS, loss_of))
    helper.assert_same(runs[1], runs[0])
