"""Several micro-batches in turns: the same values as in sequence, and each block is read once."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import lohan
import mezo_helper as helper
import pytest
import torch
from kit import device_bytes_min, host_bytes_min
from lohan.common._inside import inside
from lohan.errors import StepError
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

COUNT = 4


def wrapped(make: Callable[[], nn.Module], store: pathlib.Path, place: str, **more: Any) -> Any:
    """Keep parameters on SSD, or behind an emulated device, where not all of them fit."""
    settings: dict[str, Any] = {"device": "cpu", **more}
    if place == "ssd":
        settings["host_bytes"] = host_bytes_min(make(), store, method="mezo")
    if place == "device":
        least = device_bytes_min(make(), store)
        settings |= {"device": "emu", "device_param_bytes": least}
    asked = {"lr": helper.LR, "eps": helper.EPS, "seed": helper.SEED, **settings}
    return lohan.wrap(make(), store=store / "run", method="mezo", **asked)


def answers(model: Any, batches: list[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    """Return a function for each batch."""
    return [lambda batch=batch: model(input_ids=batch).logits for batch in batches]


@pytest.mark.parametrize("place", ["ssd", "device"])
@pytest.mark.parametrize("make", [helper.opt, helper.opt_untied, helper.gpt2])
def test_micro_batches_in_turns_have_their_values_and_one_read_for_all(
    make: Callable[[], nn.Module], place: str, store_dir: pathlib.Path
) -> None:
    model = wrapped(make, store_dir, place)
    batches = helper.batches(COUNT)
    for batch in batches[:2]:
        model.zo_step(lambda batch=batch: helper.loss_of(model, batch))
    model.eval()
    assert inside(model).runs.is_together
    reads, values = [], []
    for in_turns in (False, True, False, True):
        before = model.optimizer.read_bytes
        functions = answers(model, batches)
        with torch.no_grad():
            values.append(
                model.zo_together(functions) if in_turns else [each() for each in functions]
            )
        reads.append(model.optimizer.read_bytes - before)
    for each in values[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values[0], each, strict=True))
    assert 0 < 2 * reads[3] < reads[2]
    # The following steps are the same as if nothing had been evaluated.
    loss = model.zo_step(lambda: helper.loss_of(model, batches[2]))
    reference = make().eval()
    plain = helper.Plain(reference, helper.Settings())
    for batch in batches[:2]:
        plain.step(lambda batch=batch: helper.loss_of(reference, batch))
    again = plain.step(lambda: helper.loss_of(reference, batches[2]))
    assert float(loss) == again
    model.lohan.close()


def test_generations_of_unlike_lengths_take_turns(store_dir: pathlib.Path) -> None:
    model = wrapped(helper.opt, store_dir, "ssd", runs="together")
    model.eval()
    prompts = helper.batches(3)

    def generate(prompt: torch.Tensor, count: int) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(
            prompt[:, :5], max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return tokens

    for counts in ((2, 5, 3), (6, 1, 1)):
        functions = [
            lambda prompt=prompt, count=count: generate(prompt, count)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        expected = [function() for function in functions]
        got = model.zo_together(functions)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    model.lohan.close()


def blocks_read() -> int:
    """Return the bytes that this process read from disks; always 0 if the store is in memory."""
    said = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(said["read_bytes"])


def test_a_first_forward_in_an_order_that_nobody_foresaw_reads_no_block_twice(
    store_dir: pathlib.Path,
) -> None:
    # the modules of its blocks are defined in another order than they are used
    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "ffn_dim": 1024, "word_embed_proj_dim": 256}
        return OPTForCausalLM(
            OPTConfig(vocab_size=2048, num_hidden_layers=8, num_attention_heads=4, **sizes)
        ).float()

    model = wrapped(make, store_dir, "ssd", runs="apart")
    model.eval()
    total = sum(unit.nbytes for unit in inside(model).layout.units)
    tied = max(unit.nbytes for unit in inside(model).layout.units)
    before = blocks_read()
    with torch.no_grad():
        model(input_ids=helper.batches(1)[0])
    assert blocks_read() - before <= 1.3 * (total + tied)
    model.lohan.close()


class Counting(nn.Module):
    """Stores a value in a forward on which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = helper.opt()
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, **words: Any) -> Any:
        self.calls += 1
        said = self.inner(input_ids=input_ids, **words)
        said.logits = said.logits * self.calls
        return said


def test_a_model_that_leaves_something_behind_is_called_one_behind_the_other(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = wrapped(Counting, store_dir, "ssd")
    model.eval()
    batches = helper.batches(COUNT)
    got = model.zo_together(answers(model, batches))
    assert "calls" in capfd.readouterr().err and not inside(model).runs.is_together
    for number, (each, batch) in enumerate(zip(got, batches, strict=True), 1):
        plain = model(input_ids=batch).logits / (COUNT + number) * number
        assert torch.allclose(each, plain, rtol=1e-5)
    model.lohan.close()


class Lazy(Counting):
    """Makes an object in its first forward, which later ones use."""

    def forward(self, input_ids: torch.Tensor, **words: Any) -> Any:
        self.calls = 1
        return self.inner(input_ids=input_ids, **words)


def test_what_the_first_forward_makes_is_nothing_left_behind(store_dir: pathlib.Path) -> None:
    model = wrapped(Lazy, store_dir, "ssd")
    model.eval()
    batches = helper.batches(COUNT)
    got = model.zo_together(answers(model, batches))
    assert inside(model).runs.is_together
    for each, function in zip(got, answers(model, batches), strict=True):
        assert torch.equal(each, function())
    model.lohan.close()


def test_in_training_mode_random_numbers_are_those_of_one_behind_the_other(
    store_dir: pathlib.Path,
) -> None:
    model = wrapped(helper.gpt2, store_dir, "ssd", runs="together")
    model.train()  # so that dropout is active
    values = []
    for in_turns in (False, True):
        torch.manual_seed(3)
        functions = answers(model, helper.batches(COUNT))
        with torch.no_grad():
            values.append(
                model.zo_together(functions) if in_turns else [each() for each in functions]
            )
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    model.lohan.close()


@pytest.mark.parametrize("who", range(3))
def test_an_error_in_one_is_raised_and_the_model_continues(
    who: int, store_dir: pathlib.Path
) -> None:
    model = wrapped(helper.opt, store_dir, "ssd", runs="together")
    model.eval()
    batches = helper.batches(3)
    functions = answers(model, batches)
    wrong = torch.full_like(batches[who], helper.VOCAB)  # this token does not exist
    functions[who] = lambda: model(input_ids=wrong).logits
    with pytest.raises(IndexError):
        model.zo_together(functions)
    functions = answers(model, batches)
    expected = [each() for each in functions]
    got = model.zo_together(functions)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not any(each.requires_grad for each in got)
    model.lohan.close()


def test_inside_a_step_it_is_refused(store_dir: pathlib.Path) -> None:
    model = wrapped(helper.opt, store_dir, "ssd")
    with pytest.raises(StepError, match="inside a forward, a backward or a step"):
        model.zo_step(lambda: model.zo_together([lambda: 1.0])[0])
    assert model.zo_together([]) == []
    model.lohan.close()
