"""A frozen twin beside the model that is trained: its values, its budget, TRL's DPOTrainer."""

from __future__ import annotations

import gc
import pathlib
import types
from typing import Any

import lohan
import numpy as np
import pytest
import torch
import trainer_helper as helper
from lohan.common import _exit
from lohan.common._inside import inside
from lohan.errors import ModelError, StepError, UnsupportedError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

pytestmark = pytest.mark.usefixtures("closed")
EXAMPLE = "12_trl_dpo.py"
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.fixture
def base(tmp_path: pathlib.Path) -> pathlib.Path:
    """A saved GPT-2 with tied weights."""
    helper.gpt2().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    return tmp_path / "base"


def unpaired(rows: Any) -> Any:
    """Return preferences as single answers, each with a label."""
    return type(rows).from_list(
        [
            {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
            for row in rows
            for kind in ("chosen", "rejected")
        ]
    )


def losses(folder: pathlib.Path, *, with_lohan: bool, **given: Any) -> list[float]:
    """Train by DPO for a few steps, and return their losses."""
    made = helper.example(EXAMPLE)
    tokenizer = made.bytes_tokenizer()
    base = str(folder / "base")
    made.make_model(base, tokenizer)
    model = made.AutoModelForCausalLM.from_pretrained(base)
    is_kto = given.pop("is_kto", False)
    rows = made.preferences()
    if is_kto:
        rows = unpaired(rows)
    args = (KTOConfig if is_kto else DPOConfig)(
        str(folder / "out"),
        use_cpu=True,
        bf16=False,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **given.pop("args", {}),
    )
    if with_lohan:
        given["callbacks"] = [lohan.TrainerCallback()]
    if with_lohan and "peft_config" not in given:
        given["ref_model"] = lohan.reference(model, weights=base)
    trainer = (KTOTrainer if is_kto else DPOTrainer)(
        model, args=args, train_dataset=rows, processing_class=tokenizer, **given
    )
    trainer.train()
    if with_lohan and "ref_model" in given:
        twin = given["ref_model"]
        for name, value in load_file(f"{base}/model.safetensors").items():
            assert torch.equal(twin.state_dict()[name], value), "the reference has changed"
        assert twin.lohan.step == 0
        assert not torch.equal(trainer.model.state_dict()[name], value)
    return helper.logged(trainer, "loss")


def test_a_forward_of_this_one_model_is_the_twins_as_well(base: pathlib.Path) -> None:
    model: Any = helper.gpt2().eval()
    plain = type(model).forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs).logits * 2

    model.forward = types.MethodType(doubled, model)
    twin = lohan.reference(model, weights=base)
    with torch.no_grad():
        assert torch.equal(twin(TOKENS), model(TOKENS))
    twin.lohan.close()


def test_dpo_has_the_losses_of_a_reference_in_memory(store_dir: pathlib.Path) -> None:
    ours = losses(store_dir / "ours", with_lohan=True)
    theirs = losses(store_dir / "theirs", with_lohan=False)
    assert len(ours) == 4 and ours[-1] < ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_kto_has_the_losses_of_a_reference_in_memory(store_dir: pathlib.Path) -> None:
    ours = losses(store_dir / "ours", with_lohan=True, is_kto=True)
    theirs = losses(store_dir / "theirs", with_lohan=False, is_kto=True)
    assert len(ours) == 4 and ours[-1] < ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_dpo_with_adapters_needs_no_reference(store_dir: pathlib.Path) -> None:
    lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    ours = losses(store_dir / "ours", with_lohan=True, **lora)
    theirs = losses(store_dir / "theirs", with_lohan=False, **lora)
    assert ours[-1] < ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_log_probabilities_that_are_computed_in_advance_are_the_same(
    store_dir: pathlib.Path,
) -> None:
    args = {"precompute_ref_log_probs": True}
    ours = losses(store_dir / "ours", with_lohan=True, args=args)
    np.testing.assert_allclose(ours, losses(store_dir / "each", with_lohan=True), rtol=1e-6)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_reference_is_read_in_place_and_has_the_bits_of_the_files(
    is_empty: bool, base: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = helper.gpt2().eval()
    if is_empty:
        with lohan.empty():
            model = helper.gpt2()
    else:
        model = helper.gpt2()
        with torch.no_grad():
            model.transformer.h[0].mlp.c_fc.weight.zero_()  # type: ignore[union-attr, operator]
    twin: Any = lohan.reference(model, weights=base)
    layout = inside(twin).layout
    assert all(layout.units[p.unit].runs for p in layout.params), "nothing is in a store"
    assert not twin.training and model.training
    assert type(twin) is type(model) and "lohan" not in model.__dict__
    out = twin(input_ids=TOKENS).logits
    assert not out.requires_grad
    assert torch.equal(out, plain(input_ids=TOKENS).logits)
    made = [each.generate(TOKENS, max_new_tokens=3, do_sample=False) for each in (twin, plain)]
    assert torch.equal(*made)
    twin.lohan.close()
    (said,) = capfd.readouterr().err.splitlines()
    assert said.endswith("nothing is trained") and "store=" not in said


def test_the_budget_of_a_reference_is_the_least(tmp_path: pathlib.Path) -> None:
    layers: Any = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    twin: Any = lohan.reference(layers, weights=tmp_path)
    budget = inside(twin).budget
    assert budget["host_bytes"] == budget["host_bytes_min"] < budget["host_bytes_full"]
    x = torch.randn(2, 512)
    assert torch.equal(twin(x), layers(x))
    more: Any = lohan.reference(layers, weights=tmp_path, host_bytes="20MB")
    assert budget["host_bytes"] < inside(more).budget["host_bytes"] <= 20_000_000
    assert torch.equal(more(x), layers(x))


def test_a_reference_beside_a_training_model_does_not_change_it(
    base: pathlib.Path, store_dir: pathlib.Path
) -> None:
    """Distillation, with both forwards before the backward."""

    def run(folder: pathlib.Path, *, with_twin: bool) -> list[float]:
        model: Any = helper.gpt2().eval()
        if with_twin:
            teacher: Any = lohan.reference(model, weights=base)
        else:
            teacher = helper.gpt2().eval().requires_grad_(False)
        model = lohan.wrap(model, store=folder, lr=1e-2)
        found = []
        for _ in range(3):
            logits = model(input_ids=TOKENS).logits
            wanted = teacher(input_ids=TOKENS).logits.softmax(-1)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
            loss = loss + logits[..., 0].mean()
            loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
            found.append(loss.item())
        return found

    ours = run(store_dir / "ours", with_twin=True)
    assert ours == run(store_dir / "theirs", with_twin=False)
    assert ours[-1] < ours[0]


def test_parameters_of_another_dtype_are_copied_and_a_line_says_so(
    base: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = helper.gpt2(torch.bfloat16)
    twin: Any = lohan.reference(model, weights=base)
    assert torch.equal(twin(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
    assert capfd.readouterr().err.count("are copied into the store: F32 in the files") == 1


def test_a_reference_has_no_backward(base: pathlib.Path) -> None:
    twin: Any = lohan.reference(helper.gpt2(), weights=base)
    with pytest.raises(RuntimeError, match="does not require grad"):
        twin(input_ids=TOKENS).logits.sum().backward()
    inputs = torch.randn(1, 4, 32, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"an input of lohan.reference\(\) requires"):
        twin(inputs_embeds=inputs)
    with torch.no_grad():
        expected = twin(inputs_embeds=inputs).logits
    assert torch.equal(twin(inputs_embeds=inputs.detach()).logits, expected)
    assert torch.is_grad_enabled()
    twin.requires_grad_(True)
    with pytest.raises(StepError):
        twin(input_ids=TOKENS)


def test_files_of_another_model_are_refused_by_the_parameter_s_name(
    base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    state = load_file(base / "model.safetensors")
    name = "transformer.h.1.attn.c_attn.weight"
    for other, said in (
        ({**state, name: torch.zeros(3, 3)}, rf"{name} is \[3, 3\]"),
        ({k: v for k, v in state.items() if k != name}, name),
    ):
        save_file(other, tmp_path / "other.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=said):
            lohan.reference(helper.gpt2(), weights=tmp_path / "other.safetensors")
    assert all(session.closed for session in _exit.sessions)


def test_what_is_no_model_to_refer_to_is_refused(
    base: pathlib.Path, store_dir: pathlib.Path
) -> None:
    with pytest.raises(ModelError, match=r"lohan\.reference takes a torch\.nn\.Module, not str"):
        lohan.reference("gpt2", weights=base)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"did you mean host_bytes="):
        lohan.reference(helper.gpt2(), weights=base, host_byte=3)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted: Any = get_peft_model(helper.gpt2(), lora)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="is its own reference"):
        lohan.reference(adapted, weights=base)
    wrapped = lohan.wrap(helper.gpt2(), store=store_dir / "wrapped")
    with pytest.raises(UnsupportedError, match=r"call lohan\.reference\(\) before lohan\.wrap"):
        lohan.reference(wrapped, weights=base)


def test_a_deleted_reference_closes_its_session(base: pathlib.Path) -> None:
    twin: Any = lohan.reference(helper.gpt2(), weights=base)
    session = twin.lohan
    gc.disable()
    try:
        del twin
        assert "closed" in repr(session)
    finally:
        gc.enable()
