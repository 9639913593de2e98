"""The optimizer is as exact as torch's own, and training from a store applies exactly it."""

from __future__ import annotations

import dataclasses
import pathlib

import kit as helper
import lohan
import pytest
import torch
from quick_helper import half_quick
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RECORDED_STEPS = 100
TRAINED_STEPS = 20
# Both round equally often, and the errors of a tensor's elements are independent. The 2-norm of n
# of them deviates by 1/sqrt(2 n), and the ratio of two by 1/sqrt(n): with the 64 elements of the
# smallest tensor by an eighth, of which the logarithm of 2 is more than five.
ERROR_RATIO_MAX, ELEMENT_COUNT_MIN = 2.0, 64


@dataclasses.dataclass
class Recording:
    """The parameters at the begin of a training run of torch alone, and its gradients."""

    start: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]


RECORDINGS: dict[tuple[str, str], Recording] = {}


def record(name: str, dtype: str) -> Recording:
    """Train with torch.optim.AdamW on fp32 masters and keep every gradient; once each."""
    if (name, dtype) not in RECORDINGS:
        model = helper.build(name, DTYPES[dtype])
        start = {key: value.detach().clone() for key, value in model.named_parameters()}
        masters = [value.detach().float().clone() for value in model.parameters()]
        optimizer = torch.optim.AdamW(masters, **helper.HYPER)
        gradients = []
        for step in range(RECORDED_STEPS):
            model.zero_grad()
            helper.language_loss(model, step).backward()
            gradients.append({key: value.grad.clone() for key, value in model.named_parameters()})
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad = param.grad.float()
            optimizer.step()
            for master, param in zip(masters, model.parameters(), strict=True):
                param.data.copy_(master)
        RECORDINGS[name, dtype] = Recording(start, gradients)
    return RECORDINGS[name, dtype]


def by_torch(recording: Recording) -> dict[str, torch.Tensor]:
    """Return torch.optim.AdamW's result for the gradients if it keeps everything in fp32."""
    params = {
        key: nn.Parameter(value.to(torch.float32, copy=True))
        for key, value in recording.start.items()
    }
    optimizer = torch.optim.AdamW(
        params.values(), betas=helper.BETAS, eps=helper.EPS, **helper.HYPER
    )
    for gradients in recording.gradients:
        for key, param in params.items():
            param.grad = gradients[key].float()
        optimizer.step()
    return {key: param.detach() for key, param in params.items()}


def by_rule(recording: Recording) -> dict[str, torch.Tensor]:
    """AdamW in fp64, written out: the value that both are measured against."""
    lr, weight_decay = helper.HYPER["lr"], helper.HYPER["weight_decay"]
    beta1, beta2 = helper.BETAS
    made = {}
    for key, start in recording.start.items():
        value = start.double()
        moment1, moment2 = torch.zeros_like(value), torch.zeros_like(value)
        for step, gradients in enumerate(recording.gradients, start=1):
            gradient = gradients[key].double()
            moment1 = beta1 * moment1 + (1 - beta1) * gradient
            moment2 = beta2 * moment2 + (1 - beta2) * gradient.square()
            root = (moment2 / (1 - beta2**step)).sqrt() + helper.EPS
            value = value * (1 - lr * weight_decay) - lr * (moment1 / (1 - beta1**step)) / root
        made[key] = value
    return made


@pytest.mark.parametrize(("name", "dtype"), half_quick(helper.MODELS, DTYPES))
def test_error_against_fp64_is_at_most_twice_that_of_torch_in_fp32(name: str, dtype: str) -> None:
    recording = record(name, dtype)
    exact = by_rule(recording)
    torchs = by_torch(recording)
    states = {key: helper.State.of(value.clone()) for key, value in recording.start.items()}
    for gradients in recording.gradients:
        for key, state in states.items():
            state.update(gradients[key])
    for key, state in states.items():
        ours = (state.master().double() - exact[key]).norm().item()
        theirs = (torchs[key].double() - exact[key]).norm().item()
        assert exact[key].numel() >= ELEMENT_COUNT_MIN
        moved = (exact[key] - recording.start[key].double()).norm().item()
        assert ours <= ERROR_RATIO_MAX * theirs, (key, ours, theirs)
        assert ours < 1e-3 * moved, (key, ours, moved)


def test_a_bf16_parameter_is_its_master_rounded() -> None:
    recording = record("gpt2", "bf16")
    for key, start in recording.start.items():
        state = helper.State.of(start.clone())
        for gradients in recording.gradients[:TRAINED_STEPS]:
            state.update(gradients[key])
        master = state.master()
        spacing = torch.finfo(torch.bfloat16).eps * master.abs()
        assert bool(((state.param.float() - master).abs() <= spacing / 2 + 1e-38).all()), key
        assert not torch.equal(state.param.float(), master), key


def test_an_fp16_parameter_is_its_master_as_torch_rounds_it() -> None:
    recording = record("gpt2", "fp16")
    for key, start in recording.start.items():
        state = helper.State.of(start.clone())
        for gradients in recording.gradients[:TRAINED_STEPS]:
            state.update(gradients[key])
        assert torch.equal(state.param, state.master().half()), key
        assert not torch.equal(state.param.float(), state.master()), key


def train_plainly(model: nn.Module) -> helper.Trained:
    """Torch's forward and backward, lohan's kernel on each gradient when backward is over."""
    states = {param: helper.State.of(param.data) for param in model.parameters()}
    losses = []
    for step in range(TRAINED_STEPS):
        loss = helper.language_loss(model, step)
        loss.backward()
        for param, state in states.items():
            state.update(param.grad)
            param.grad = None
        losses.append(loss.item())
    return helper.Trained(losses, model.state_dict())


@pytest.mark.parametrize(
    ("name", "dtype", "host_bytes"), half_quick(helper.MODELS, DTYPES, ["minimal", "full"])
)
def test_a_wrapped_model_is_the_kernel_applied_to_the_gradients_of_a_plain_one(
    name: str, dtype: str, host_bytes: str, store_dir: pathlib.Path
) -> None:
    expected = train_plainly(helper.build(name, DTYPES[dtype]))
    smallest = None
    if host_bytes == "minimal":
        smallest = helper.host_bytes_min(helper.build(name, DTYPES[dtype]), store_dir)
    model = lohan.wrap(
        helper.build(name, DTYPES[dtype]),
        store=store_dir / "run",
        host_bytes=smallest,
        **helper.HYPER,
    )
    actual = helper.train(model, range(TRAINED_STEPS), helper.language_loss)
    helper.assert_same(actual, expected)
