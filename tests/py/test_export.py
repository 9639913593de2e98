"""Weights out: the files of export and save_pretrained are those that transformers writes."""

from __future__ import annotations

import filecmp
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import kit
import lohan
import pytest
import torch
from lohan.layout import _safetensors
from safetensors.torch import load_file, load_model
from torch import nn

VOCABULARY = 96
FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


def opt() -> Any:
    """A bf16 model with a tied head."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return OPTForCausalLM(config).to(torch.bfloat16)


def llama() -> Any:
    """An fp32 model without tied weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def mixtral() -> Any:
    """Experts that are one tensor in memory, and many in the files."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)


def train(model: Any, step_count: int) -> None:
    """Train some steps on tokens that follow from the step's number."""
    for step in range(step_count):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.optimizer.step()


def check_same(ours: pathlib.Path, theirs: pathlib.Path) -> None:
    """Two folders have the same files, byte for byte."""
    names = sorted(os.listdir(theirs))
    assert sorted(os.listdir(ours)) == names
    for name in names:
        assert filecmp.cmp(ours / name, theirs / name, shallow=False), name


def check_same_tensors(ours: pathlib.Path, theirs: pathlib.Path) -> None:
    """Two folders have the same tensors, however they are divided."""
    found: list[dict[str, torch.Tensor]] = []
    for folder in (ours, theirs):
        found.append({})
        for path in folder.glob("*.safetensors"):
            found[-1].update(load_file(path))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.parametrize("build", [opt, llama, mixtral])
@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_save_pretrained_writes_what_the_unwrapped_model_writes(
    store_dir: pathlib.Path, build: Callable[[], Any], shard: str
) -> None:
    model = lohan.wrap(build(), store=store_dir / "s", lr=1e-2)
    train(model, 2)
    model.save_pretrained(store_dir / "ours", max_shard_size=shard)
    train(model, 1)
    # this replaces the first export
    model.save_pretrained(store_dir / "ours", max_shard_size=shard)
    plain: Any = lohan.unwrap(model)
    plain.save_pretrained(store_dir / "theirs", max_shard_size=shard)
    if build is mixtral:  # transformers splits tensors that share a storage differently
        check_same_tensors(store_dir / "ours", store_dir / "theirs")
    else:
        check_same(store_dir / "ours", store_dir / "theirs")


@pytest.mark.parametrize("build", [opt, llama])
def test_export_of_a_store_a_session_and_a_model_are_the_same_files_and_load(
    store_dir: pathlib.Path, build: Callable[[], Any]
) -> None:
    model: Any = lohan.wrap(build(), store=[store_dir / "s0", store_dir / "s1"], lr=1e-2)
    store = [store_dir / "s1", store_dir / "s0"]
    train(model, 2)
    files = lohan.export(model, store_dir / "model", max_shard_size="20KB")
    assert len(files) > 4 and all(file.is_file() for file in files)
    lohan.export(model.lohan, store_dir / "session", max_shard_size=20_000)
    lohan.export(store, store_dir / "open", max_shard_size="20KB")
    model.lohan.close()
    lohan.export(store, store_dir / "closed", max_shard_size="20KB")
    plain: Any = lohan.unwrap(model)
    plain.save_pretrained(store_dir / "theirs", max_shard_size="20KB")
    for name in ("model", "session", "open", "closed"):
        check_same(store_dir / name, store_dir / "theirs")
    again = type(plain).from_pretrained(store_dir / "closed")
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_export_in_fp32_is_the_master_that_rounds_to_the_trained_parameter(
    store_dir: pathlib.Path, dtype: torch.dtype
) -> None:
    """bf16 training keeps every bit of the masters, so it can continue in fp32."""
    model: Any = lohan.wrap(llama().to(dtype), store=store_dir / "s", lr=1e-3)
    train(model, 3)
    lohan.export(model, store_dir / "live", dtype="float32")
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.lohan.close()
    lohan.export(store_dir / "s", store_dir / "closed", dtype=torch.float32)
    check_same(store_dir / "live", store_dir / "closed")
    masters = load_file(store_dir / "closed" / "model.safetensors")
    assert json.loads((store_dir / "closed" / "config.json").read_text())["dtype"] == "float32"
    differ = 0
    for name, value in trained.items():
        master = masters[name]
        assert master.dtype == torch.float32
        step = torch.finfo(dtype).eps * master.abs().clamp(min=torch.finfo(dtype).tiny)
        assert bool(((value.float() - master).abs() <= step).all()), name
        differ += int((value.float() != master).sum())
    assert differ > 1000, "the masters are no finer than the parameters"


def test_export_of_mixed_experts_without_the_model_has_the_model_s_own_names(
    store_dir: pathlib.Path,
) -> None:
    model: Any = lohan.wrap(mixtral(), store=store_dir / "s")
    expected = dict(model.state_dict())
    model.lohan.close()
    lohan.export(store_dir / "s", store_dir / "out")
    loaded = type(model).from_pretrained(store_dir / "out")
    kit.assert_same_state(dict(loaded.state_dict()), expected)


class Normed(nn.Module):
    """Buffers that change as it is trained, a tied parameter, one that is frozen and not float."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


def normed_step(model: Any, step: int) -> float:
    """Train one step and return the loss."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    loss = model(x)
    loss.backward()
    model.optimizer.step()
    return loss.item()


@pytest.mark.parametrize("step_count", [0, 3])
def test_a_plain_module_is_exported_with_its_buffers_and_tied_parameters_once(
    store_dir: pathlib.Path, step_count: int
) -> None:
    model: Any = lohan.wrap(Normed(), store=store_dir / "s", lr=1e-2)
    for step in range(step_count):
        normed_step(model, step)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    lohan.export(model, store_dir / "live")
    model.lohan.close()
    lohan.export(store_dir / "s", store_dir / "closed")
    check_same(store_dir / "closed", store_dir / "live")
    fresh = Normed()
    load_model(fresh, store_dir / "closed" / "model.safetensors")
    assert fresh.first.weight is fresh.second.weight
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_resumed_run_continues_with_the_buffers_of_its_commit(store_dir: pathlib.Path) -> None:
    torch.manual_seed(3)
    model: Any = lohan.wrap(Normed(), store=store_dir / "s", lr=1e-2)
    for step in range(4):
        normed_step(model, step)
    model.lohan.close()
    torch.manual_seed(3)
    one: Any = lohan.wrap(Normed(), store=store_dir / "t", lr=1e-2)
    whole = [normed_step(one, step) for step in range(8)]
    again: Any = lohan.wrap(Normed(), store=store_dir / "s", resume=True)
    assert int(again.norm.num_batches_tracked) == 4
    assert [normed_step(again, step) for step in range(4, 8)] == whole[4:]
    assert torch.equal(again.norm.running_var, one.norm.running_var)
    state = {**again.state_dict(), "norm.running_mean": torch.full((8,), 7.0)}
    del state["table"]
    again.load_state_dict(state, strict=False)
    again.lohan.close()
    last: Any = lohan.wrap(Normed(), store=store_dir / "s", resume=True)
    assert bool((last.norm.running_mean == 7.0).all()), "load_state_dict's buffers were lost"


def test_a_full_disk_leaves_nothing_and_says_how_much_is_missing(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = lohan.wrap(llama(), store=store_dir / "s")
    monkeypatch.setattr(_safetensors.shutil, "disk_usage", lambda _: Free())
    with pytest.raises(
        lohan.errors.StoreError,
        match=r"need [\d,]+ bytes \(\S+ kB\), 1,000 bytes are free, and [\d,]+ bytes \(",
    ):
        model.save_pretrained(store_dir / "new" / "deep")
    assert not (store_dir / "new").exists()
    monkeypatch.undo()
    model.save_pretrained(store_dir / "old", max_shard_size="20KB")
    before = {path.name: path.read_bytes() for path in (store_dir / "old").iterdir()}
    train(model, 1)
    for fail_at in (1, 7, 25):
        monkeypatch.setattr(_safetensors.os, "write", Failing(fail_at))
        with pytest.raises(lohan.errors.StoreError, match="disk is full"):
            model.save_pretrained(store_dir / "old", max_shard_size="20KB")
        monkeypatch.undo()
        assert {path.name: path.read_bytes() for path in (store_dir / "old").iterdir()} == before
    train(model, 1)  # the session can still train


class Free:
    free = 1000


class Failing:
    """Let os.write fail as on a full disk, from one call on."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at
        self.plain = os.write

    def __call__(self, descriptor: int, data: Any) -> int:
        self.left -= 1
        if self.left <= 0:
            raise OSError(28, "No space left on device")
        return self.plain(descriptor, data)


def test_no_earlier_model_is_left_among_the_files_nor_replaced_unasked(
    store_dir: pathlib.Path,
) -> None:
    model: Any = lohan.wrap(llama(), store=store_dir / "s")
    out = store_dir / "out"
    model.save_pretrained(out, max_shard_size="20KB")
    (out / "tokenizer.json").write_text("{}")
    left = out / f"{_safetensors._WORKING}999999999"  # a folder of a process that was killed
    left.mkdir()
    model.save_pretrained(out)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert set(os.listdir(out)) == names
    with pytest.raises(lohan.errors.StoreExistsError, match="overwrite"):
        lohan.export(model, out)
    lohan.export(model, out, max_shard_size="20KB", overwrite=True)
    assert not (out / "model.safetensors").exists() and not left.exists()
    assert (out / "model.safetensors.index.json").exists()
    for bad in (0, "a lot", "-5GB"):
        with pytest.raises(lohan.errors.ModelError, match="5GB"):
            lohan.export(model, store_dir / "none", max_shard_size=bad)
    with pytest.raises(lohan.errors.ModelError, match="float32"):
        lohan.export(model, store_dir / "none", dtype="int4")
    with pytest.raises(lohan.errors.ModelError, match="not wrapped"):
        lohan.export(llama(), store_dir / "none")


def test_a_given_state_dict_is_saved_as_it_is(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(opt(), store=store_dir / "s")
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.save_pretrained(store_dir / "given", state_dict=state)
    saved = load_file(store_dir / "given" / "model.safetensors")
    assert all(bool((value == 1).all()) for value in saved.values())
    hollow = dict(model.named_parameters())
    model.save_pretrained(store_dir / "hollow", state_dict=hollow)
    model.save_pretrained(store_dir / "plain")
    check_same(store_dir / "hollow", store_dir / "plain")


def test_a_process_that_transformers_does_not_save_in_writes_nothing(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers writes in rank 0 only, once torch.distributed is initialized."""
    model = lohan.wrap(llama(), store=store_dir / "s")
    rank = "transformers.distributed.mixin._get_torch_distributed_rank"
    is_begun = "transformers.distributed.mixin._is_torch_distributed_initialized"
    monkeypatch.setattr(is_begun, lambda: True)
    monkeypatch.setattr(rank, lambda: 1)
    model.save_pretrained(store_dir / "out")
    assert not (store_dir / "out").exists()
    monkeypatch.setattr(rank, lambda: 0)
    model.save_pretrained(store_dir / "out")
    assert (store_dir / "out" / "model.safetensors").exists()


def test_the_command_exports_without_the_models_code(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(opt(), store=[store_dir / "s0", store_dir / "s1"])
    model.lohan.close()
    words = ["export", str(store_dir / "s0"), str(store_dir / "s1"), str(store_dir / "out")]
    script = "import sys; sys.modules['transformers'] = None; from lohan.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--max-shard-size", "20KB", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["bytes"] > 20_000 and str(store_dir / "out" / FILES[2]) in said["files"]
    plain: Any = lohan.unwrap(model)
    plain.save_pretrained(store_dir / "theirs", max_shard_size="20KB")
    check_same(store_dir / "out", store_dir / "theirs")
    again = subprocess.run(
        [sys.executable, "-m", "lohan", *words], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1 and "--overwrite" in again.stderr
