"""Values that are given to an empty model are kept, and origins() names the source of each."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lohan
import lora_helper
import pytest
import torch
from lohan.errors import ModelError, UnsupportedError
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    OPTConfig,
    OPTForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and an adapter of it with a saved head, all of whose values are random."""
    made = tmp_path_factory.mktemp("given")
    lora_helper.save_base(made / "base", torch.float32)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(made / "base"),
        LoraConfig(**LORA, modules_to_save=["final_layer_norm"]),
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn_like(param))
    model.save_pretrained(made / "adapter")
    return made


def empty(folder: Path) -> Any:
    config = OPTConfig.from_pretrained(folder / "base")
    with lohan.empty():
        return AutoModelForCausalLM.from_config(config)


def saved(folder: Path) -> Any:
    return load_peft_weights(str(folder / "adapter"), device="cpu")


def of_peft(folder: Path, **settings: Any) -> Any:
    return PeftModel.from_pretrained(
        empty(folder), folder / "adapter", is_trainable=True, **settings
    )


def inside(folder: Path) -> Any:
    with lohan.empty():
        return of_peft(folder)


def by_state_dict(folder: Path) -> Any:
    config = LoraConfig(**LORA, modules_to_save=["final_layer_norm"])
    model = get_peft_model(empty(folder), config)
    set_peft_model_state_dict(model, saved(folder))
    return model


def beside_a_new_one(folder: Path) -> Any:
    model = of_peft(folder)
    model.add_adapter("new", LoraConfig(**LORA))
    return model


def of_transformers(folder: Path) -> Any:
    model = empty(folder)
    model.load_adapter(str(folder / "adapter"), is_trainable=True)
    return model


WAYS: dict[str, Callable[[Path], Any]] = {
    "peft": of_peft,
    "peft, low_cpu_mem_usage": lambda folder: of_peft(folder, low_cpu_mem_usage=True),
    "peft, inside empty()": inside,
    "set_peft_model_state_dict": by_state_dict,
    "beside a new adapter": beside_a_new_one,
    "transformers": of_transformers,
    "a copy": lambda folder: copy.deepcopy(inside(folder)),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_that_is_loaded_into_an_empty_base_is_kept(
    way: str, folder: Path, tmp_path: Path
) -> None:
    model = WAYS[way](folder)
    model = lohan.wrap(model, weights=folder / "base", store=tmp_path / "store")
    origins, state = model.lohan.origins(), model.state_dict()
    model.lohan.close()
    count = 0
    for name, value in saved(folder).items():
        plain = name if way != "transformers" else name.removeprefix("base_model.model.")
        for end in ("weight", "bias"):
            plain = re.sub(rf"(lora_[AB])\.{end}$", rf"\1.default.{end}", plain)
            plain = re.sub(rf"norm\.{end}$", f"norm.modules_to_save.default.{end}", plain)
        assert torch.equal(state[plain], value.to(state[plain].dtype)), name
        assert origins[plain].kind == "memory", (name, origins[plain])
        count += 1
    assert count == 14
    assert {"file", "memory", "tied"} >= {origin.kind for origin in origins.values()}


def test_a_saved_copy_of_a_module_is_kept_beside_a_base_in_memory(
    folder: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    model = lohan.wrap(model, weights=folder / "base", store=tmp_path / "store")
    name = "base_model.model.model.decoder.final_layer_norm"
    value = saved(folder)[f"{name}.weight"]
    assert torch.equal(model.state_dict()[f"{name}.modules_to_save.default.weight"], value)
    model.lohan.close()


def test_a_fresh_copy_of_a_module_has_the_values_of_the_files(folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(**LORA, modules_to_save=["final_layer_norm"])
    model = get_peft_model(empty(folder), config)
    model = lohan.wrap(model, weights=folder / "base", store=tmp_path / "store")
    name = "base_model.model.model.decoder.final_layer_norm.modules_to_save.default.weight"
    assert model.lohan.origins()[name].kind == "file"
    assert torch.equal(model.state_dict()[name], torch.ones(64))
    model.lohan.close()


def test_what_a_script_gives_to_an_empty_model_is_kept_or_refused(tmp_path: Path) -> None:
    save_file({"one.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with lohan.empty():
        model = nn.ModuleDict({n: nn.Linear(4, 3, bias=False) for n in ("one", "two", "three")})
        model["three"].weight = nn.Parameter(torch.full((3, 4), 3.0))
    model["two"].load_state_dict({"weight": torch.full((3, 4), 2.0)})
    with pytest.raises(ModelError, match=r"after\s+lohan\.wrap"):
        model["two"].weight.data[1] = torch.ones(4)
    model = lohan.wrap(model, weights=tmp_path, store=tmp_path / "store")
    state = model.state_dict()
    for number, name in ((0, "one"), (2, "two"), (3, "three")):
        assert torch.equal(state[f"{name}.weight"], torch.full((3, 4), float(number))), name
    kinds = [origin.kind for origin in model.lohan.origins().values()]
    assert kinds.count("file") == 1 and kinds.count("memory") == 2
    model.lohan.close()


def test_values_that_are_loaded_take_precedence_over_the_files(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with lohan.empty():
        model = nn.Linear(4, 3, bias=False)
    model.load_state_dict({"weight": torch.ones(3, 4)})
    model = lohan.wrap(model, weights=tmp_path, store=tmp_path / "store")
    assert torch.equal(model.state_dict()["weight"], torch.ones(3, 4))
    assert model.lohan.origins()["weight"].kind == "memory"
    model.lohan.close()


def test_a_new_head_is_given_to_the_empty_one_as_two_messages_say(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(5, 4)}
    save_file(values, tmp_path / "model.safetensors")

    def built(size: int) -> Any:
        with lohan.empty():
            layers = [nn.Linear(4, n, bias=False) for n in (4, size)]
            return nn.Sequential(*layers)

    model = built(3)
    with pytest.raises(ModelError, match=r"is \[5, 4\].*configuration.*load_state_dict"):
        lohan.wrap(model, weights=tmp_path, store=tmp_path / "store")
    model[1].load_state_dict(nn.Linear(4, 3, bias=False).state_dict())  # the way out
    model = lohan.wrap(model, weights=tmp_path, store=tmp_path / "store")
    assert model.state_dict()["1.weight"].any()
    model.lohan.close()
    model = built(5)
    model[1] = nn.Linear(4, 5, bias=False)  # the files win, and the note says what to do
    model = lohan.wrap(model, weights=tmp_path, store=tmp_path / "other")
    model.lohan.close()
    assert "call load_state_dict() of the module" in capfd.readouterr().err
    model = built(5)
    model[1].load_state_dict(nn.Linear(4, 5, bias=False).state_dict())
    model = lohan.wrap(model, weights=tmp_path, store=tmp_path / "third")
    assert model.state_dict()["1.weight"].any() and "memory than" not in capfd.readouterr().err
    model.lohan.close()


class Special(nn.Module):
    """Layers that their owner's constructor initialises, beside a plain one."""

    def __init__(self, *, in_part: bool = False) -> None:
        super().__init__()
        for name in ("base", "zeros", "high", "narrow"):
            setattr(self, name, nn.Linear(64, 64))
        nn.init.zeros_(self.zeros.weight)
        nn.init.normal_(self.high.weight, mean=5.0, std=0.01)
        nn.init.trunc_normal_(self.narrow.weight, std=1e-3)
        nn.init.orthogonal_(torch.empty_like(self.base.weight, device="cpu"))
        self.narrow.weight.data.mul_(0.5)
        self.high.bias.data.fill_(-2.0)
        self.narrow.bias = nn.Parameter(torch.full((64,), 3.0))
        if in_part:
            self.zeros.bias.data[:3].fill_(1.0)


@pytest.mark.parametrize("settings", [{"init": "model"}, {}, {"init": "function"}], ids=str)
def test_fresh_values_are_those_that_a_constructor_writes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    if settings != {"init": "model"}:
        base = nn.Linear(64, 64).state_dict()
        save_file(
            {f"base.{name}": value for name, value in base.items()}, tmp_path / "a.safetensors"
        )
        settings = {**settings, "weights": tmp_path}
    if settings.get("init") == "function":
        settings["init"] = lambda module: [p.fill_(7) for p in module.parameters(recurse=False)]
    with lohan.empty():
        model = Special()
    model = lohan.wrap(model, store=tmp_path / "store", **settings)
    state = model.state_dict()
    model.lohan.close()
    if callable(settings.get("init")):
        assert (state["zeros.weight"] == 7).all() and (state["narrow.bias"] == 7).all()
        return
    assert (state["narrow.bias"] == 3).all()
    assert not state["zeros.weight"].any() and (state["high.bias"] == -2).all()
    assert 4.9 < state["high.weight"].min() < state["high.weight"].max() < 5.1
    assert 0 < state["narrow.weight"].std() < 1e-3 and 0.05 < state["zeros.bias"].std() < 0.1
    if settings == {"init": "model"}:
        with lohan.empty():
            model = Special(in_part=True)
        with pytest.raises(ModelError, match=r"'zeros\.bias' is in no file.* to a part"):
            lohan.wrap(model, store=tmp_path / "other", **settings)


class Valued(nn.Module):
    """A module whose constructor makes parameters of values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.places = nn.Parameter(torch.arange(8.0).to(torch.bfloat16))
        self.tau = nn.Parameter(torch.tensor(2.5))
        self.changed = nn.Parameter(torch.linspace(0, 1, 8))
        self.changed.data.mul_(0.5)
        self.written = nn.Parameter(torch.empty(8).fill_(3))
        self.late = nn.Parameter(torch.Tensor(8))
        self.list = nn.ParameterList([torch.eye(3)])

    def reset_parameters(self) -> None:
        nn.init.constant_(self.late, 4)


def test_values_of_which_a_constructor_makes_parameters_are_kept(tmp_path: Path) -> None:
    plain = Valued()
    plain.reset_parameters()
    save_file(
        {f"layer.{name}": value for name, value in plain.layer.state_dict().items()},
        tmp_path / "a.safetensors",
    )
    with lohan.empty():
        model = Valued()
    model = lohan.wrap(model, weights=tmp_path, init="model", store=tmp_path / "store")
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    model.lohan.close()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.strided], ids=str)
def test_tensors_of_any_layout_are_made_while_a_model_is_built(layout: torch.layout) -> None:
    with lohan.empty():
        made = torch.empty(8, 8, layout=layout)
    assert made.layout == layout


def test_a_model_may_be_built_in_inference_mode() -> None:
    with torch.inference_mode(), lohan.empty():
        model = Valued()
    assert model.layer.weight.shape == (8, 8)


def test_a_parameter_that_no_code_gives_values_is_refused(tmp_path: Path) -> None:
    class Unset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(8))

    with lohan.empty():
        model = Unset()
    with pytest.raises(ModelError, match="scale has no initialisation in Unset"):
        lohan.wrap(model, init="model", store=tmp_path / "store")


def test_what_a_module_initialises_in_another_one_is_repeated(tmp_path: Path) -> None:
    """T5Attention sets the standard deviations of its projections, and has no parameter itself."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = T5Config(vocab_size=64, **sizes)
    plain = T5ForConditionalGeneration(config).state_dict()
    with lohan.empty():
        model = T5ForConditionalGeneration(config)
    model = lohan.wrap(model, init="model", store=tmp_path / "store")
    for name, value in model.state_dict().items():
        assert float(value.std()) == pytest.approx(float(plain[name].std()), rel=0.3), name
    model.lohan.close()


def test_an_initialisation_that_needs_other_modules_is_refused(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.empty(4))

        def _init_weights(self, module: nn.Module) -> None:
            if module is self:
                nn.init.normal_(self.inner.weight)

    with lohan.empty():
        model = Outer()
    with pytest.raises(ModelError, match=r"Outer: .*_init_weights cannot .* init=FUNCTION"):
        lohan.wrap(model, init="model", store=tmp_path / "store")


def classifier(folder: Path, base: Path) -> Any:
    config = OPTConfig.from_pretrained(base, num_labels=3)
    with lohan.empty():
        return OPTForSequenceClassification(config)


@pytest.mark.parametrize("init", [None, "model", "function"])
def test_a_head_that_the_files_lack_is_initialised(
    init: Any, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 7.0)

    given = fill if init == "function" else init
    model = classifier(folder, folder / "base")
    model = lohan.wrap(model, weights=folder / "base", store=tmp_path / "store", init=given)
    head = model.state_dict()["score.weight"].float()
    assert (head == 7).all() if init == "function" else 0.005 < head.std() < 0.05
    origins = model.lohan.origins()
    assert origins["score.weight"].kind == ("init" if init else "fresh")
    assert [o.kind for n, o in origins.items() if n != "score.weight"].count("file") == 52
    assert ("1 by init= (score.weight)" if init else "1 fresh (score.weight)") in (
        capfd.readouterr().err
    )
    model.lohan.close()


def test_a_head_that_the_files_may_have_under_another_name_is_reported(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "base", tmp_path / "base")
    index = tmp_path / "base" / "model.safetensors.index.json"
    config = OPTConfig.from_pretrained(folder / "base", num_labels=3)
    saved = {"old.weight": torch.full((3, config.word_embed_proj_dim), 5.0)}
    save_file(saved, tmp_path / "base" / "head.safetensors", {"format": "pt"})
    said = json.loads(index.read_text())
    said["weight_map"]["old.weight"] = "head.safetensors"
    index.write_text(json.dumps(said))
    model = classifier(folder, folder / "base")
    model = lohan.wrap(model, weights=tmp_path / "base", store=tmp_path / "a")
    said = capfd.readouterr().err
    assert "has no value for 'score.weight'" in said and "'old.weight'" in said
    model.lohan.close()
    model = classifier(folder, folder / "base")
    model.load_state_dict({"score.weight": saved["old.weight"]}, strict=False)  # as it says
    model = lohan.wrap(model, weights=tmp_path / "base", store=tmp_path / "b")
    assert "has no value for" not in capfd.readouterr().err
    assert (model.state_dict()["score.weight"] == 5).all()
    model.lohan.close()


def test_a_head_of_peft_has_the_values_of_its_original(folder: Path, tmp_path: Path) -> None:
    config = LoraConfig(**{**LORA, "task_type": "SEQ_CLS"})
    model = get_peft_model(classifier(folder, folder / "base"), config)
    model = lohan.wrap(model, weights=folder / "base", store=tmp_path / "store")
    state = model.state_dict()
    names = [name for name in state if ".score." in name]
    assert len(names) == 2 and torch.equal(state[names[0]], state[names[1]])
    model.lohan.close()


def test_a_base_that_the_files_do_not_have_is_refused(folder: Path, tmp_path: Path) -> None:
    for names in (r"decoder\.layers\.1\.", r"decoder\.layers\.", "."):
        (tmp_path / "part").mkdir(exist_ok=True)
        made = {}
        for path in (folder / "base").glob("*.safetensors"):
            made |= {n: t for n, t in load_file(path).items() if not re.search(names, n)}
        save_file(made or {"other": torch.zeros(1)}, tmp_path / "part" / "model.safetensors")
        with pytest.raises(ModelError, match=r"has no value for \d+ parameters.*pass init="):
            lohan.wrap(empty(folder), weights=tmp_path / "part", store=tmp_path / "store")


def test_an_initialisation_from_the_base_is_refused_with_a_way_out(
    folder: Path, tmp_path: Path
) -> None:
    config = LoraConfig(**LORA, init_lora_weights="pissa")
    with pytest.raises(ModelError, match=r"get_peft_model on a base that is in memory"):
        get_peft_model(empty(folder), config)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = get_peft_model(base, config)
    want = model(input_ids=lora_helper.BATCH).logits
    with pytest.raises(UnsupportedError, match="without weights="):
        lohan.wrap(model, weights=folder / "base", store=tmp_path / "store")
    model = lohan.wrap(model, store=tmp_path / "store")
    assert torch.equal(model(input_ids=lora_helper.BATCH).logits, want)
    model.lohan.close()


def test_origins_name_the_file_the_tied_names_and_the_store(folder: Path, tmp_path: Path) -> None:
    model = lohan.wrap(empty(folder), weights=folder / "base", store=tmp_path / "store")
    origins = model.lohan.origins()
    found = origins["model.decoder.embed_tokens.weight"]
    assert found.kind == "file" and found.name == "model.decoder.embed_tokens.weight"
    assert found.name in load_file(found.where)
    assert str(origins["lm_head.weight"]) == "tied: model.decoder.embed_tokens.weight"
    assert {*origins} == {*model.state_dict()}
    model.lohan.close()
    model = lohan.wrap(empty(folder), store=tmp_path / "store", resume=True)
    assert {o.kind for o in model.lohan.origins().values()} == {"store", "tied"}
    model.lohan.close()


def test_values_in_memory_that_the_files_replace_are_reported(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for is_changed in (False, True):
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        if is_changed:  # as an adapter that was merged changes it
            base.model.decoder.layers[1].fc1.weight.data[-1, -1] += 1
        model = lohan.wrap(base, weights=folder / "base", store=tmp_path / f"{is_changed}")
        model.lohan.close()
        said = "1 parameters have other values in memory" in capfd.readouterr().err
        assert said == is_changed
