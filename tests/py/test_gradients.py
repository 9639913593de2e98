"""The gradients that the engine receives are those of the unwrapped module, bit for bit."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
import transformers
from lohan.common._inside import inside
from lohan.errors import UnsupportedError
from quick_helper import half_quick
from rules_helper import assert_same_gradients, watch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

VOCABULARY = 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    **IDS,
}
Loss = Callable[[nn.Module, int, torch.dtype], torch.Tensor]


# --- The zoo: small models of every shape, dropout on where they have it -------------------------


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=32, use_cache=False, **IDS
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        max_position_embeddings=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
        **IDS,
    )
    return transformers.OPTForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, **IDS
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
        **IDS,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **LLAMA)
    return transformers.MixtralForCausalLM(config)


def sequential() -> nn.Module:
    layers = [
        layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.1))
    ]
    return nn.Sequential(*layers)


class Shared(nn.Module):
    """Calls the same module twice, with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.twice = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.twice(layer(x))
        return x


def language_loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (2, 16), generator=generator)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def image_loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(2, 3, 16, 16, generator=generator).to(dtype)
    loss: torch.Tensor = model(pixel_values=images, labels=torch.tensor([1, 7])).loss
    return loss


def vector_loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: torch.Tensor = model(torch.randn(4, 32, generator=generator).to(dtype)).square().mean()
    return loss


ZOO: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "gpt2": (gpt2, language_loss),
    "llama": (llama, language_loss),
    "opt": (opt, language_loss),
    "bert": (bert, language_loss),
    "t5": (t5, language_loss),
    "vit": (vit, image_loss),
    "mixtral": (mixtral, language_loss),
    "sequential": (sequential, vector_loss),
    "shared": (Shared, vector_loss),
}


# --- How they are compared -----------------------------------------------------------------------


def build(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype).train()


def backward(model: nn.Module, loss_of: Loss, step: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(100 + step)  # both models draw the same dropout
    loss = loss_of(model, step, dtype)
    loss.backward()
    return loss.detach()


def check(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    dtype: torch.dtype,
    folder: pathlib.Path,
    budget: str,
    reference_loss_of: Loss | None = None,
) -> None:
    """Train two steps of a wrapped model, and compare each with a plain model's."""
    settings: dict[str, Any] = {"lr": 1e-2}
    if budget == "minimal":
        settings["host_bytes"] = helper.host_bytes_min(build(make, dtype), folder)
    elif budget == "unsplit":
        whole = lohan.wrap(build(make, dtype), store=folder / "whole")
        whole.lohan.close()
        settings["host_bytes"] = inside(whole).budget["host_bytes_min"]
    elif budget == "emu":
        settings["device"] = "emu"
        settings["device_param_bytes"] = helper.device_bytes_min(build(make, dtype), folder)
        settings["host_bytes"] = helper.host_bytes_min(build(make, dtype), folder, **settings)
    plain = watch(build(make, dtype))
    wrapped = watch(build(make, dtype))
    model = lohan.wrap(wrapped.model, store=folder / "store", **settings)
    with contextlib.closing(model.lohan):
        assert model is wrapped.model
        for step in range(2):
            plain.model.load_state_dict(model.state_dict())
            expected = backward(plain.model, reference_loss_of or loss_of, step, dtype)
            actual = backward(model, loss_of, step, dtype)
            assert torch.equal(actual, expected)
            assert_same_gradients(wrapped.take(), plain.take())
            model.optimizer.step()
        if budget != "full":
            model.lohan.flush()
            link = "copy_in" if budget == "emu" else "param_read"
            assert model.lohan.stats().bytes[link] > 0  # so blocks were evicted and loaded


# --- Tests ---------------------------------------------------------------------------------------

BUDGETS = ["minimal", "full", "emu"]


@pytest.mark.parametrize(("name", "dtype", "budget"), half_quick(ZOO, DTYPES, BUDGETS))
def test_gradients_equal_the_plain_models(
    name: str, dtype: str, budget: str, store_dir: pathlib.Path
) -> None:
    make, loss_of = ZOO[name]
    check(make, loss_of, DTYPES[dtype], store_dir, budget)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward, with nothing saved outside of them.

    A nested backward is then the first thing that saves or accumulates. LayerNorm saves its weight
    itself, and not a view of it as Linear does.
    """

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        blocks = (
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(4)
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize(
    ("use_reentrant", "early_stop", "budget"), half_quick([True, False], [True, False], BUDGETS)
)
def test_gradients_are_equal_with_checkpointed_blocks(
    use_reentrant: bool, early_stop: bool, budget: str, store_dir: pathlib.Path
) -> None:
    with set_checkpoint_early_stop(early_stop):
        check(lambda: Checkpointed(use_reentrant), vector_loss, torch.float32, store_dir, budget)


@pytest.mark.parametrize(
    ("name", "use_reentrant", "budget"), half_quick(["gpt2", "llama", "t5"], [True, False], BUDGETS)
)
def test_gradients_are_equal_with_the_models_own_checkpointing(
    name: str, use_reentrant: bool, budget: str, store_dir: pathlib.Path
) -> None:
    def make() -> nn.Module:
        model = ZOO[name][0]()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model

    check(make, language_loss, torch.bfloat16, store_dir, budget)


def freeze_front(model: nn.Module) -> nn.Module:
    """Freeze the first two of three blocks."""
    for name, param in model.named_parameters():
        param.requires_grad_(not re.search(r"\.[01]\.", name))
    return model


def freeze_matrices(model: nn.Module) -> nn.Module:
    """Freeze a part of every block: what is saved for backward needs no gradient."""
    for param in model.parameters():
        param.requires_grad_(param.dim() == 1)
    return model


def freeze_vectors(model: nn.Module) -> nn.Module:
    """Freeze norms and biases."""
    for param in model.parameters():
        param.requires_grad_(param.dim() != 1)
    return model


@pytest.mark.parametrize(
    ("name", "freeze", "use_reentrant"),
    half_quick(
        ["gpt2", "llama", "checkpointed"],
        [freeze_front, freeze_matrices, freeze_vectors],
        [True, False],
    ),
)
def test_gradients_are_equal_with_frozen_parameters_in_checkpoints(
    name: str,
    freeze: Callable[[nn.Module], nn.Module],
    use_reentrant: bool,
    store_dir: pathlib.Path,
) -> None:
    def make() -> nn.Module:
        if name == "checkpointed":
            return freeze(Checkpointed(use_reentrant))
        model = ZOO[name][0]()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        return freeze(model)

    loss_of = vector_loss if name == "checkpointed" else language_loss
    # A recomputed block is resident as a whole, so it must not be split to fit.
    check(make, loss_of, torch.float32, store_dir, "unsplit")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_are_equal_when_the_whole_model_is_checkpointed(
    use_reentrant: bool, store_dir: pathlib.Path
) -> None:
    def loss_of(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 32, generator=generator).to(dtype).requires_grad_()
        loss: torch.Tensor = checkpoint(model, x, use_reentrant=use_reentrant).square().mean()
        return loss

    check(RootParameter, loss_of, torch.float32, store_dir, "full")


class RootParameter(nn.Module):
    """A root with its own parameters, around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def autocast(loss_of: Loss, cache_enabled: bool, cast_dtype: torch.dtype = torch.bfloat16) -> Loss:
    def loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cpu", dtype=cast_dtype, cache_enabled=cache_enabled):
            return loss_of(model, step, dtype)

    return loss


@pytest.mark.parametrize(
    ("name", "cast", "budget"),
    half_quick(["gpt2", "llama", "vit", "sequential", "shared"], ["bf16", "fp16"], BUDGETS),
)
def test_gradients_are_equal_under_autocast(
    name: str, cast: str, budget: str, store_dir: pathlib.Path
) -> None:
    make, loss_of = ZOO[name]
    # With its cache, autocast sums the gradients of a weight used twice in bf16 instead of fp32.
    reference = autocast(loss_of, name in {"llama", "vit", "sequential"}, DTYPES[cast])
    wrapped = autocast(loss_of, True, DTYPES[cast])
    check(make, wrapped, torch.float32, store_dir, budget, reference)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_are_equal_under_autocast_with_checkpointed_blocks(
    use_reentrant: bool, store_dir: pathlib.Path
) -> None:
    check(
        lambda: Checkpointed(use_reentrant),
        autocast(vector_loss, cache_enabled=True),
        torch.float32,
        store_dir,
        "minimal",
        autocast(vector_loss, cache_enabled=False),
    )


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_grad_dtype_other_than_that_of_the_parameter_is_refused_when_it_is_set(
    when: str, store_dir: pathlib.Path
) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))
    said = r"'0\.weight' is torch\.bfloat16.*float32.*set its grad_dtype to None"
    if when == "before":
        model[0].weight.grad_dtype = torch.float32
        with pytest.raises(UnsupportedError, match=said):
            lohan.wrap(model, store=store_dir, lr=1e-3)
        model[0].weight.grad_dtype = None
    lohan.wrap(model, store=store_dir, lr=1e-3)
    for step in (1, 2):
        if when == "after":
            with pytest.raises(UnsupportedError, match=said):
                model[0].weight.grad_dtype = torch.float32
        model[0].weight.grad_dtype = torch.bfloat16
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        model.optimizer.step()
        assert model.lohan.step == step
    model.lohan.close()
