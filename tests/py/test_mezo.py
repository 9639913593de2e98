"""Zeroth-order training under lohan is MeZO, bit for bit, wherever the parameters are."""

from __future__ import annotations

import copy
import errno
import os
import pathlib
import re
import tempfile
from typing import Any

import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import (
    BudgetError,
    HyperParameterError,
    ModelError,
    StepError,
    StoreError,
    StoreExistsError,
    StoreMismatchError,
    UnsupportedError,
)
from lohan.journal._journal import BYTES, NAME
from lohan.mezo._zo_setup import best_every
from mezo_helper import (
    EPS,
    LR,
    SEED,
    Plain,
    Settings,
    batches,
    differing,
    loss_of,
    opt,
    opt_untied,
    plain_run,
    steps,
)
from quick_helper import half_quick
from torch import nn

STEPS = 20
# Whether the two forwards of a step run together or one after the other.
RUNS = ("together", "apart")


# Bytes beyond the least that works: the first is all that there is.
TIERS = {"memory": None, "some": 40_000, "least": 0}


def least_of(model: nn.Module, **more: Any) -> int:
    with pytest.raises(BudgetError) as refused, tempfile.TemporaryDirectory() as folder:
        lohan.wrap(model, store=folder, method="mezo", host_bytes=1, **more)
    found = re.search(r"at least (\d+)", str(refused.value))
    assert found
    return int(found[1])


def wrapped(model: nn.Module, store: pathlib.Path, tier: str = "memory", **more: Any) -> Any:
    more_bytes = TIERS[tier]
    if more_bytes is not None:
        more["host_bytes"] = more_bytes + least_of(copy.deepcopy(model))
    return lohan.wrap(
        model, store=store, method="mezo", **{"lr": LR, "eps": EPS, "seed": SEED, **more}
    )


def test_a_schedule_s_rates_are_those_of_the_steps(store_dir: pathlib.Path) -> None:
    data = batches(6)
    plain = Plain(opt(), Settings())
    for step, batch in enumerate(data):
        plain.lr = LR / (1 + step)
        plain.step(lambda batch=batch: loss_of(plain.model, batch))
    model = wrapped(opt(), store_dir)
    schedule = torch.optim.lr_scheduler.LambdaLR(model.optimizer, lambda step: 1 / (1 + step))
    for batch in data:
        model.optimizer.step(lambda batch=batch: loss_of(model, batch))
        schedule.step()
    assert differing(model, plain.values()) == []
    model.lohan.close()


def test_weights_stay_in_the_user_s_files_and_a_step_writes_64_bytes(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = batches(6)
    _, values = plain_run(opt, len(data), Settings())
    opt().save_pretrained(tmp_path / "base")
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    model = wrapped(opt(), store_dir, weights=tmp_path / "base")
    written = (store_dir / "lohan.data").stat().st_size
    steps(model, data)
    assert differing(model, values) == []
    model.lohan.close()
    assert (store_dir / "lohan.data").stat().st_size == written
    assert inside(model).layout.units[0].runs
    assert (store_dir / NAME).stat().st_size == BYTES * (1 + len(data))
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(("tied", "tier"), half_quick([True, False], ["memory", "least"]))
def test_runs_in_turns_have_the_bits_of_runs_one_behind_the_other(
    tier: str, tied: bool, store_dir: pathlib.Path
) -> None:
    make = opt if tied else opt_untied
    losses, values = plain_run(make, 6, Settings(samples=2))
    read = {}
    for runs in RUNS:
        model = wrapped(make(), store_dir / runs, tier, runs=runs, num_samples=2)
        assert steps(model, batches(6)) == losses
        read[runs] = model.optimizer.read_bytes
        assert differing(model, values) == []
        model.lohan.close()
    if tier == "least" and not tied:
        assert read["together"] < 0.6 * read["apart"]


DEVICE_CASES = [
    ("together", ()),
    ("apart", ()),
    ("together", ("overlap",)),
    ("together", ("reuse",)),
    ("together", ("deferred",)),
]


@pytest.mark.parametrize(("runs", "ablate"), DEVICE_CASES, ids=str)
def test_blocks_that_pass_through_a_device_have_the_same_bits(
    runs: str, ablate: tuple[str, ...], store_dir: pathlib.Path
) -> None:
    losses, values = plain_run(opt, 6, Settings())
    layout = inside(wrapped(opt(), store_dir / "sizes")).layout
    sizes = sorted((unit.nbytes for unit in layout.units), reverse=True)
    slots = sum(sizes[:3])
    model = wrapped(
        opt(),
        store_dir / "run",
        device="emu",
        device_param_bytes=slots,
        device_bytes=2 * slots,
        runs=runs,
        ablate=ablate,
    )
    assert inside(model).runs.is_together == (runs == "together")
    assert steps(model, batches(6)) == losses
    assert differing(model, values) == []
    # Every block was brought in again and again, and led from where its last visit left it.
    assert model.optimizer.read_bytes > 4 * sum(sizes)
    assert inside(model).method.longest_lead < inside(model).method.rule.step_length
    model.lohan.close()


def test_a_snapshot_between_writes_has_the_step_it_says(store_dir: pathlib.Path) -> None:
    losses, _ = plain_run(opt, 8, Settings())
    data = batches(8)
    model = wrapped(opt(), store_dir, write_every=2)
    steps(model, data[:3])
    made = model.lohan.snapshot(store_dir / "copy")
    steps(model, data[3:])
    assert made.wait().step == 3
    model.lohan.close()
    again = lohan.wrap(opt(), store=store_dir / "copy", method="mezo", resume=True)
    assert steps(again, data[3:]) == losses[3:]
    again.lohan.close()


def test_a_run_that_ended_before_its_first_step_continues_with_its_own_numbers(
    store_dir: pathlib.Path,
) -> None:
    data = batches(8)
    losses, _ = plain_run(opt, 8, Settings(decay=0.1))
    wrapped(opt(), store_dir, weight_decay=0.1).lohan.close()
    again = lohan.wrap(opt(), store=store_dir, method="mezo", resume=True)
    groups = again.optimizer.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(LR, 0.1)]
    assert steps(again, data) == losses
    again.lohan.close()


def test_k_grows_with_what_writes_cost_and_falls_with_what_z_costs() -> None:
    # sqrt(2 (4 ns + 2 ns) / 0.5 ns) = sqrt(24)
    assert best_every(0.5e-9, 1e9, 2e9) == 5
    assert best_every(0.5e-9, 0.25e9, 0.5e9) == 10
    assert best_every(5e-9, 1e9, 2e9) == 2
    assert best_every(1e-6, 1e9, 2e9) == 1


def test_parameters_that_fit_in_memory_are_never_written_and_others_are(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    opt().save_pretrained(tmp_path / "base")
    kept = wrapped(opt(), store_dir / "a", weights=tmp_path / "base")
    assert inside(kept).method.zeroth.write_every is None
    assert all(unit.runs for unit in inside(kept).layout.units)
    kept.lohan.close()
    model = wrapped(opt(), store_dir / "b", "least", weights=tmp_path / "base")
    assert 1 <= inside(model).method.zeroth.write_every <= 1024
    assert not any(unit.runs for unit in inside(model).layout.units)
    data = batches(4)
    assert steps(model, data) == plain_run(opt, 4, Settings())[0]
    model.lohan.close()
    with pytest.raises(StoreMismatchError, match="no room"):
        lohan.wrap(opt(), store=store_dir / "a", method="mezo", resume=True, write_every=4)


def test_evaluation_between_steps_sees_the_clean_parameters(store_dir: pathlib.Path) -> None:
    data = batches(4)
    plain = Plain(opt(), Settings())
    model = wrapped(opt(), store_dir, "some").eval()
    for batch in data:
        assert float(model.zo_step(lambda b=batch: loss_of(model, b))) == float(
            torch.tensor(plain.step(lambda b=batch: loss_of(plain.model, b)))
        )
        with torch.no_grad():
            assert torch.equal(model(input_ids=batch).logits, plain.model(input_ids=batch).logits)
        asked = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(
            model.generate(batch[:1], **asked), plain.model.generate(batch[:1], **asked)
        )
    model.lohan.close()


def test_export_and_unwrap_give_the_parameters_of_now(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from transformers import OPTForCausalLM

    data = batches(3)
    _, values = plain_run(opt, len(data), Settings())
    model = wrapped(opt(), store_dir)
    steps(model, data)
    model.save_pretrained(tmp_path / "open")
    model.lohan.close()
    lohan.export(store_dir, tmp_path / "closed", dtype="float32")
    for name in ("open", "closed"):
        assert differing(OPTForCausalLM.from_pretrained(tmp_path / name), values) == []
    assert lohan.verify(store_dir).is_whole
    lohan.unwrap(model)
    assert differing(model, values) == []
    assert all(param.requires_grad for param in model.parameters())


def test_a_snapshot_continues_as_the_run_would_have(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = batches(5)
    losses, values = plain_run(opt, len(data), Settings())
    model = wrapped(opt(), store_dir)
    steps(model, data[:2])
    made = model.lohan.snapshot(store_dir / "copy")
    steps(model, data[2:])
    assert made.wait().step == 2
    model.lohan.close()
    again = lohan.wrap(opt(), store=store_dir / "copy", method="mezo", resume=True)
    assert again.lohan.step == 2
    assert steps(again, data[2:]) == losses[2:]
    assert differing(again, values) == []
    again.lohan.close()


@pytest.mark.parametrize("tier", ["memory", "some"])
def test_a_step_that_dies_has_not_happened(tier: str, store_dir: pathlib.Path) -> None:
    data = batches(4)
    losses, values = plain_run(opt, len(data), Settings())
    model = wrapped(opt(), store_dir, tier)
    first = steps(model, data[:2])

    def failing(count: int, make: Any) -> Any:
        calls: list[int] = []

        def closure() -> Any:
            calls.append(0)
            mine = len(calls)
            loss = loss_of(model, data[2])
            return make(loss) if mine == count else loss

        return closure

    def fail(loss: Any) -> Any:
        raise KeyError("a batch")

    for count in (1, 2):
        with pytest.raises(KeyError, match="a batch"):
            model.zo_step(failing(count, fail))
        with pytest.raises(StepError, match="loss of a step is nan"):
            model.zo_step(failing(count, lambda loss: loss * float("nan")))
    assert model.lohan.step == 2
    assert first + steps(model, data[2:]) == losses
    assert differing(model, values) == []
    model.lohan.close()


def test_only_what_requires_a_gradient_moves(store_dir: pathlib.Path) -> None:
    def half() -> nn.Module:
        model = opt()
        for name, param in model.named_parameters():
            param.requires_grad_("fc" in name)
        return model

    data = batches(4)
    losses, values = plain_run(half, len(data), Settings())
    model = wrapped(half(), store_dir, "some")
    assert steps(model, data) == losses
    assert differing(model, values) == []
    model.lohan.close()


def test_adapters_move_and_are_saved_by_peft(
    store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    def adapted() -> Any:
        model = get_peft_model(
            opt(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
        )
        torch.manual_seed(1)
        for name, param in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(param)
        return model

    data = batches(4)
    losses, values = plain_run(adapted, len(data), Settings())
    model = wrapped(adapted(), store_dir)
    assert steps(model, data) == losses
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    moved = {name.replace(".default", ""): v for name, v in values.items() if "lora_" in name}
    assert saved.keys() == moved.keys()
    assert all(torch.equal(saved[name], moved[name]) for name in saved)
    model.lohan.close()


TUNERS = {
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 16}),
    "ia3": ("IA3Config", {"target_modules": ["q_proj", "fc2"], "feedforward_modules": ["fc2"]}),
}


@pytest.mark.parametrize("kind", TUNERS)
@pytest.mark.parametrize("tier", ["memory", "least"])
def test_other_adapters_of_peft_move_are_resumed_and_load_without_lohan(
    tier: str, kind: str, store_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    import peft

    name, settings = TUNERS[kind]

    def adapted() -> Any:
        model = opt()
        torch.manual_seed(1)
        made = getattr(peft, name)(task_type="CAUSAL_LM", **settings)
        return peft.get_peft_model(model, made)

    data = batches(4)
    losses, values = plain_run(adapted, len(data), Settings())
    model = wrapped(adapted(), store_dir, tier)
    first = steps(model, data[:2])
    host_bytes = inside(model).config.host_bytes
    model.lohan.close()
    model = lohan.wrap(
        adapted(), store=store_dir, method="mezo", resume=True, host_bytes=host_bytes
    )
    assert first + steps(model, data[2:]) == losses
    assert differing(model, values) == []
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(opt(), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        logits = model(input_ids=data[0]).logits
        assert torch.equal(plain(input_ids=data[0]).logits, logits)
    model.lohan.close()


# --- Resuming -------------------------------------------------------------------------------------


def test_a_run_continues_by_its_own_rule_only(store_dir: pathlib.Path) -> None:
    model = wrapped(opt(), store_dir)
    steps(model, batches(1))
    model.lohan.close()
    for more, what in (({"eps": 2e-3}, "eps"), ({"seed": 8}, "seed"), ({"rng": "torch"}, "rng")):
        with pytest.raises(StoreMismatchError, match=what):
            lohan.wrap(opt(), store=store_dir, method="mezo", resume=True, **more)
    with pytest.raises(StoreMismatchError, match='method="mezo", not method="adamw"'):
        lohan.wrap(opt(), store=store_dir, resume=True)
    frozen = opt()
    frozen.lm_head.weight.requires_grad_(False)
    with pytest.raises(StoreError):
        lohan.wrap(frozen, store=store_dir, method="mezo", resume=True)
    (store_dir / NAME).rename(store_dir / "away")
    with pytest.raises(StoreError, match="journal"):
        lohan.wrap(opt(), store=store_dir, method="mezo", resume=True)


def test_a_full_disk_and_a_journal_without_its_store_are_said(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, values = plain_run(opt, 3, Settings())
    model = wrapped(opt(), store_dir)
    done = steps(model, batches(1))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(StoreError, match=r"cannot write .*journal\.lohan.*No space left"):
            steps(model, batches(2)[1:])
    assert done + steps(model, batches(3)[1:]) == losses
    assert differing(model, values) == []
    model.lohan.close()
    (store_dir / "lohan.data").unlink()
    with pytest.raises(StoreExistsError, match="move the journal away"):
        wrapped(opt(), store_dir)
    assert sorted(each.name for each in store_dir.iterdir()) == [NAME, "steps.lohan"]


# --- Refusals -------------------------------------------------------------------------------------


def test_what_has_no_meaning_is_refused_by_name(store_dir: pathlib.Path) -> None:
    for more, error in (
        ({"max_grad_norm": 1.0}, UnsupportedError),
        ({"betas": (0.9, 0.99)}, UnsupportedError),
        ({"gradient_accumulation_steps": 2}, UnsupportedError),
        ({"eps": 0.0}, ModelError),
        ({"num_samples": 0}, ModelError),
        ({"num_samples": True}, ModelError),
        ({"seed": True}, ModelError),
        ({"seed": -1}, ModelError),
        ({"rng": "dice"}, ModelError),
        ({"lr": float("nan")}, HyperParameterError),
    ):
        model = opt()
        with pytest.raises(error, match=next(iter(more))):
            wrapped(model, store_dir, **more)
        assert all(param.requires_grad for param in model.parameters())
    with pytest.raises(ModelError, match="float32"):
        wrapped(opt().double(), store_dir)
    with pytest.raises(ModelError, match="method"):
        lohan.wrap(opt(), store=store_dir, method="tiger")
    with pytest.raises(ModelError, match="mezo"):
        lohan.wrap(opt(), store=store_dir, seed=1)
    assert list(store_dir.iterdir()) == []


def test_parameters_are_changed_by_steps_alone(store_dir: pathlib.Path) -> None:
    data = batches(2)
    _, values = plain_run(opt, len(data), Settings())
    model = wrapped(opt(), store_dir)
    steps(model, data)
    model.load_state_dict(model.state_dict())
    with pytest.raises(UnsupportedError, match="only steps change"):
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    with pytest.raises(UnsupportedError, match="only steps change"), torch.no_grad():
        for _, param in model.named_parameters():
            param.zero_()
    with pytest.raises(StepError, match="no gradients"):
        model.optimizer.step()
    with pytest.raises(StepError, match="inside"):
        model.zo_step(lambda: model.zo_step(lambda: loss_of(model, data[0])))
    assert differing(model, values) == []
    model.lohan.close()
