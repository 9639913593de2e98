"""Losses that read a head outside of the head's forward, on wrapped models: the same bits."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
import torch.nn.functional as F
from lohan.common import _inside
from lohan.errors import HollowParameterError, SecondBackwardError
from lohan.losses import linear_cross_entropy
from rules_helper import WIDTH, Workshop, build, vectors
from torch import nn
from torch.utils.checkpoint import checkpoint
from trl.trainer.utils import add_fused_lm_head

Loss = Callable[[nn.Module, int], torch.Tensor]
CHUNKS = {"token_chunk": 5, "vocab_chunk": 100}


def shifted(step: int) -> torch.Tensor:
    """Return the next token of each token, and nothing for the last."""
    return F.pad(helper.tokens(step)[:, 1:], (0, 1), value=-100)


def body_and_head(model: Any) -> tuple[nn.Module, Any]:
    """Return a language model's body, and its head."""
    return model.base_model, model.get_output_embeddings()


def without_logits(model: Any, step: int) -> torch.Tensor:
    """Return the loss of a language model that is not called itself."""
    body, head = body_and_head(model)
    hidden = body(helper.tokens(step)).last_hidden_state
    return linear_cross_entropy(hidden, head.weight, shifted(step), **CHUNKS)


class Inside(nn.Module):
    """A model whose own forward computes the loss."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = helper.build(name, dtype)

    def forward(self, step: int) -> torch.Tensor:
        return without_logits(self.model, step)


def inside(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(step)
    return loss


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_inside_the_model_s_forward(name: str, device: str, workshop: Workshop) -> None:
    workshop.follow(lambda: Inside(name, torch.float32), inside, device=device, host_bytes=None)


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_outside_of_the_model_s_call(
    name: str, dtype: torch.dtype, device: str, workshop: Workshop
) -> None:
    """gpt2's head is tied to its embedding, llama's is a block of its own."""
    model = workshop.follow(lambda: helper.build(name, dtype), without_logits, device=device)
    with pytest.raises(HollowParameterError, match=r"weight'.*not in memory"):
        body_and_head(model)[1].weight.sum()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_loss_is_that_of_the_model_s_own_logits(name: str, workshop: Workshop) -> None:
    model = workshop.wrap(helper.build(name, torch.float32))
    with torch.no_grad():
        expected = helper.language_loss(model, 0)
        actual = without_logits(model, 0)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0.0)


def trl_loss(model: Any, step: int) -> torch.Tensor:
    """Return TRL's loss, which reads the head's weight in a function of autograd."""
    if "_fused_forward" not in getattr(model.forward, "__qualname__", ""):
        add_fused_lm_head(model)
    batch = helper.tokens(step)
    loss: torch.Tensor = model(input_ids=batch, labels=batch, fused_lm_head=True).loss
    return loss


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_trl_s_fused_head_has_its_own_bits(name: str, device: str, workshop: Workshop) -> None:
    def make() -> nn.Module:
        model: Any = helper.build(name, torch.float32)
        add_fused_lm_head(model)
        return model

    workshop.follow(make, trl_loss, device=device, host_bytes=None)


class GradientsInForward(torch.autograd.Function):
    """What Liger's LigerFusedLinearCrossEntropyFunction does, without its kernels.

    It reads the weight only in forward, piece by piece, and saves the gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: Any) -> torch.Tensor:
        loss = torch.zeros(len(target))
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for at in range(0, len(target), 8):
            rows = slice(at, at + 8)
            logits = (hidden[rows] @ weight.t()).log_softmax(-1)
            loss[rows] = -logits.gather(1, target[rows, None])[:, 0]
            slope = logits.exp() - F.one_hot(target[rows], len(weight))
            of_hidden[rows] = slope @ weight
            of_weight += slope.t() @ hidden[rows]
        ctx.save_for_backward(of_hidden, of_weight)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return *(gradient * saved for saved in ctx.saved_tensors), None


class ReadsInBackward(torch.autograd.Function):
    """Computes logits twice: once in forward, and once in backward from the saved weight."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: Any) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, target)
        return F.cross_entropy(hidden @ weight[: len(weight)].t(), target, reduction="sum")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, target = ctx.saved_tensors
        slope = (hidden @ weight.t()).softmax(-1) - F.one_hot(target, len(weight))
        return gradient * (slope @ weight), gradient * (slope.t() @ hidden), None


class WithFunction(nn.Module):
    """A model whose forward gives the head's weight to a function of autograd."""

    def __init__(self, name: str, function: Any) -> None:
        super().__init__()
        self.model = helper.build(name, torch.float32)
        self.function = function

    def forward(self, step: int) -> torch.Tensor:
        body, head = body_and_head(self.model)
        hidden = body(helper.tokens(step)).last_hidden_state
        target = helper.tokens(step + 1)
        loss: torch.Tensor = self.function(hidden.flatten(0, 1), head.weight, target.flatten())
        return loss


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("function", [GradientsInForward, ReadsInBackward])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_functions_of_autograd_that_read_the_head_have_their_own_bits(
    name: str, function: Any, device: str, workshop: Workshop
) -> None:
    workshop.follow(
        lambda: WithFunction(name, function.apply), inside, device=device, host_bytes=None
    )


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Liger's kernels need a GPU, or TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_liger_s_fused_loss_has_its_own_bits(name: str, device: str, workshop: Workshop) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    ops = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")

    def loss(*args: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ops.LigerFusedLinearCrossEntropyFunction.apply(*args)[0]
        return found

    workshop.follow(lambda: WithFunction(name, loss), inside, device=device, host_bytes=None)


# --- Other ways to use it ------------------------------------------------------------------------


class Tower(nn.Module):
    """Blocks, and a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 40)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


def frozen_tower() -> nn.Module:
    model = Tower()
    model.head.requires_grad_(False)
    return model


def tower_loss(model: Any, step: int, **given: Any) -> torch.Tensor:
    hidden = model.body(vectors(step))
    targets = torch.arange(len(hidden)) + step
    head = model.head
    return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, **given)


@pytest.mark.parametrize("make", [Tower, frozen_tower])
def test_a_head_with_a_bias_trained_or_frozen(
    make: Callable[[], nn.Module], workshop: Workshop
) -> None:
    workshop.follow(make, tower_loss)


def test_a_loss_for_each_token_reads_the_head_in_backward(workshop: Workshop) -> None:
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])
    workshop.follow(
        Tower, lambda model, step: (tower_loss(model, step, reduction="none") * weights).sum()
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_a_checkpoint_it_is_computed_again_in_backward(
    use_reentrant: bool, workshop: Workshop
) -> None:
    def loss_of(model: Any, step: int) -> torch.Tensor:
        targets, head = torch.arange(4) + step, model.head

        def last(x: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(x, head.weight, targets, bias=head.bias)

        hidden = model.body(vectors(step))
        loss: torch.Tensor = checkpoint(last, hidden, use_reentrant=use_reentrant)
        return loss

    workshop.follow(Tower, loss_of, host_bytes=None, schedule="deferred")


@pytest.mark.parametrize("make", [Tower, frozen_tower])
def test_under_autocast(make: Callable[[], nn.Module], workshop: Workshop) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tower_loss(model, step)

    workshop.follow(make, loss_of)


def test_zeroth_order_steps_see_the_same_losses_in_every_budget(store_dir: pathlib.Path) -> None:
    def losses(name: str, **settings: Any) -> list[float]:
        model = lohan.wrap(build(Tower), store=store_dir / name, method="mezo", **settings)
        found = [float(model.zo_step(lambda i=i: tower_loss(model, i))) for i in range(3)]
        model.lohan.close()
        return found

    full = losses("full")
    assert losses("emu", device="emu") == full
    assert losses("one", write_every=1) == full


def test_a_closed_session_and_a_forward_at_the_wrong_time_are_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build(Tower))
    hidden, targets = torch.ones(4, WIDTH, requires_grad=True), torch.arange(4)
    tower_loss(model, 0).backward()
    with pytest.raises(SecondBackwardError, match=r"before optimizer\.step"):
        linear_cross_entropy(hidden, model.head.weight, targets)
    model.optimizer.step()
    loss = linear_cross_entropy(hidden, model.head.weight, targets)
    assert not _inside.inside(model).is_underway and loss.isfinite()
    model.lohan.close()
    with pytest.raises(HollowParameterError, match="its session is closed"):
        linear_cross_entropy(hidden, model.head.weight, targets)


def test_an_error_in_the_loss_leaves_the_session_usable(workshop: Workshop) -> None:
    model = workshop.wrap(build(Tower))

    class Failing(torch.Tensor):
        """Fails when it is multiplied."""

        @classmethod
        def __torch_function__(
            cls, func: Any, kinds: Any, args: Any = (), given: Any = None
        ) -> Any:
            if func is torch.mm:
                raise KeyboardInterrupt
            return super().__torch_function__(func, kinds, args, given or {})

    hidden = torch.ones(4, WIDTH).as_subclass(Failing)
    with pytest.raises(KeyboardInterrupt):
        linear_cross_entropy(hidden, model.head.weight, torch.arange(4))
    assert not _inside.inside(model).is_underway
    tower_loss(model, 0).backward()
    model.optimizer.step()


# --- Budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_bits_in_every_budget(name: str, dtype: str, store_dir: pathlib.Path) -> None:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def train(label: str, **settings: Any) -> helper.Trained:
        model = lohan.wrap(
            helper.build(name, kind), store=store_dir / label, **settings, **helper.HYPER
        )
        return helper.train(model, range(4), without_logits)

    expected = train("full")
    least = helper.host_bytes_min(helper.build(name, kind), store_dir)
    helper.assert_same(train("least", host_bytes=least), expected)
    helper.assert_same(train("deferred", schedule="deferred"), expected)
    slots = helper.device_bytes_min(helper.build(name, kind), store_dir)
    helper.assert_same(train("emu", device="emu", device_param_bytes=slots), expected)
    helper.assert_same(train("again", activations="recompute"), expected)
