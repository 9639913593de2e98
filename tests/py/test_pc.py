"""`lohan plan` for PCs as people describe them: each is answered, and the first line is quick."""

from __future__ import annotations

import io
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner
from lohan.cli import main
from lohan.commands import _pc, _world_show
from lohan.errors import MachineError
from lohan.planning import _machines, _models, _parts, _quick, _several, _shapes
from lohan.simulate import Options, simulate
from rich.console import Console

MACHINES = {  # of PCs: GPUs, main memory and drives, as people write them
    "laptop": ("rtx-4060-laptop", "32GB", "1TB"),
    "workstation laptop": ("RTX 4090 Laptop", "64GiB", "2TB,7GB/s"),
    "new laptop": ("5080 laptop", "32GiB", "2TB"),
    "old": ("RTX 3060", "16GiB", "1TB,3.5GB/s,600TBW"),
    "small": ("rtx4060ti", "32GiB", "1TB"),
    "middle": ("4070 Ti Super", "32GiB", "2TB,7GB/s,1200TBW"),
    "large": ("rtx-4090", "64GiB", "2TB,7GB/s,1200TBW"),
    "newest": ("NVIDIA GeForce RTX 5090", "128GiB", "2x2TB,14GB/s,1200TBW"),
    "two": ("2x-rtx-3090", "128GiB", "4TB,7GB/s,2400TBW"),
    "two new": ("2x RTX 5090", "256GiB", "2x4TB,14GB/s"),
    "server": ("h100", "1TiB", "4x3.84TB,14GB/s,6.75GB/s,7PBW"),
    "four": ("4x l40s", "512GiB", "2x7.68TB,7GB/s,5GB/s"),
}
MODELS = ["llama-8b", "qwen3-14b", "qwen3-30b-a3b", "gpt-oss-20b", "bert-large", "vit-large"]
MODELS += ["flux-dev", "sdxl"]
WORDS: dict[str, Any] = {"seq": 1024, "gpus": None, "nodes": None, "net": None}


def _made(gpu: str, ram: str, ssd: str, **words: Any) -> Any:
    return _pc.machine_of((gpu, ram, ssd), (), {**WORDS, **words}, {})


EACH = """
import json, sys
from lohan.commands import _pc
machines, models, words = json.loads(sys.argv[1])
for parts in machines:
    machine = _pc.machine_of(tuple(parts), (), words, {})
    for model in models:
        line = _pc.first_line({"model": model, "batch": 8, "tokens": 1e8}, machine, words)
        print(line)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_each_pc_has_a_first_line_for_each_model_without_importing_torch() -> None:
    given = json.dumps([[*MACHINES.values()], MODELS, WORDS])
    done = subprocess.run([sys.executable, "-c", EACH, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(MACHINES) * len(MODELS)
    answered = [line for line in lines if line.startswith("about ") and "bound by: " in line]
    refused = [line for line in lines if "probably does not fit" in line]
    assert len(answered) + len(refused) == len(lines)
    assert len(answered) > len(lines) * 0.8


@pytest.mark.parametrize(
    ("written", "name", "count"),
    [
        ("RTX 4090", "rtx-4090", 1),
        ("4070ti", "rtx-4070-ti", 1),
        ("rtx 4070 TI super", "rtx-4070-ti-super", 1),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx-4060-laptop", 1),
        ("rtx-3080-ti mobile", "rtx-3080-ti-laptop", 1),
        ("2x-rtx-3090", "rtx-3090", 2),
        ("2 x RTX 3090", "rtx-3090", 2),
        ("H100", "h100", 1),
        ("a6000", "rtx-a6000", 1),
        ("NVIDIA H100 80GB HBM3", "h100", 1),
        ("NVIDIA A100-SXM4-80GB", "a100", 1),
        ("GeForce RTX 3080 10GB", "rtx-3080", 1),
        ("2x 3090 24 GB", "rtx-3090", 2),
        ("A100 80GB", "a100", 1),
        ("NVIDIA-H200-141GB", "h200", 1),
    ],
)
def test_gpus_are_known_by_the_names_that_people_write(written: str, name: str, count: int) -> None:
    assert _parts.gpus_of(written) == (name, count)


def test_an_unknown_gpu_is_refused_with_the_closest_names() -> None:
    for written, close in (
        ("rtx-4095", "rtx-4090"),
        ("9x-rtx-3090", "rtx-3090"),
        ("RTX 4060 Ti 8GB", "--gpu rtx-4060-ti --set gpu_bytes=8GiB"),
        ("Radeon RX 7900 XTX", "need CUDA"),
        ("arc-b580", "need CUDA"),
        ("M4 Max", "need CUDA"),
        ("M40", "pass the name of a GPU"),
    ):
        with pytest.raises(MachineError, match=close):
            _parts.gpus_of(written)


def test_two_gpus_are_named_in_two_ways_and_share_the_lanes_of_a_slot() -> None:
    two = _made("2x-rtx-3090", "128GiB", "2TB")
    assert two == _made("rtx-3090", "128GiB", "2TB", gpus=2) and two.gpu_count == 2
    one = _made("rtx-3090", "128GiB", "2TB")
    assert two.link_in_bytes_per_s == one.link_in_bytes_per_s // 2
    assert _parts.alone(two) == one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "8GiB", "--ram", "32GiB", "--ssd", "1TB"), "8GiB is the size of its memory"),
        (("--ram", "32GiB", "--ssd", "1TB"), "which GPU does it have?"),
        (("--gpu", "rtx-4090"), "needs --ram, for example"),
        (("--gpu", "2x-rtx-3090", "--gpus", "3", "--ram", "1TB", "--ssd", "1TB"), "has 2 GPUs"),
        (("--gpu", "4090", "--ram", "1TB", "--ssd", "1TB", "--nodes", "2"), "--nodes cannot"),
    ],
)
def test_a_pc_without_a_gpus_name_is_not_answered_for_this_machine(
    words: tuple[str, ...], message: str
) -> None:
    done = CliRunner().invoke(main, ["plan", "--model", "llama-8b", *words])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_pc_without_a_model_lists_what_it_trains() -> None:
    words = ["plan", "--gpu", "rtx-4090", "--ram", "64GiB", "--ssd", "2TB"]
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    rows = {(row["model"], row["way"]): row for row in found["models"]}
    assert {name for name, _ in rows} == _shapes.ALL.keys()
    small, large = rows["llama-8b", "all parameters"], rows["gpt-oss-120b", "all parameters"]
    assert small["fits"] and small["ssd_life_days"] > 1 and not large["fits"]
    assert rows["llama-8b", "LoRA"]["tokens_per_s"] > small["tokens_per_s"]
    text = CliRunner().invoke(main, words).output
    assert "rtx-4090, 64GiB of RAM, 2TB" in text and "does not fit" in text
    without = CliRunner().invoke(main, [*words[:-2], "--json"])
    assert json.loads(without.stdout) == found
    assert "one drive of 2TB is assumed" in without.stderr


# --- Sketches -----------------------------------------------------------------------------------

_SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_SMALL,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 192,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
    },
    "bert": {
        **_SMALL,
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "intermediate_size": 256,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    },
    "vit": {
        **_SMALL,
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "intermediate_size": 256,
        "image_size": 64,
        "patch_size": 16,
        "num_channels": 3,
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_sketch_is_the_model_within_a_few_percent(kind: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    sketch, counted = _quick.sketch(str(path), 2, 64), _models.load(str(path), 2, 64)
    assert sketch is not None
    if kind == "vit":  # its head has as many classes as ImageNet, the config's 2
        assert sketch.tokens == counted.tokens == 2 * 16
    else:
        assert sketch.param_count == pytest.approx(counted.param_count, rel=0.04)
        assert sketch.forward_flop == pytest.approx(counted.forward_flop, rel=0.02)
    assert sketch.activation_bytes == pytest.approx(counted.activation_bytes, rel=0.5)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 30.5),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("mixtral-8x7b", 46.7),
        ("flux-dev", 11.9),
        ("sd3.5-large", 8.1),
        ("sdxl", 2.57),
        ("bert-large", 0.335),
        ("vit-large", 0.304),
        ("llama-8b", 8.03),
    ],
)
def test_the_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    model = _quick.sketch(name, 1, 64)
    assert model is not None
    assert model.param_count / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_active_parameters_of_a_mixture_compute() -> None:
    model = _quick.sketch("qwen3-30b-a3b", 1, 64)
    assert model is not None
    active = model.forward_flop / 2 / model.tokens
    assert active == pytest.approx(3.3e9, rel=0.1)


def test_the_first_line_is_near_the_simulated_step() -> None:
    machine = _parts.machine("rtx-4070-ti-super", "32GiB", "2TB,7GB/s,1200TBW")
    model = _models.load("opt-2.7b", 2, 256)
    sketch = _quick.sketch("opt-2.7b", 2, 256)
    assert sketch is not None
    step = simulate(model, machine, Options())
    assert _quick.step(sketch, machine).step_s == pytest.approx(step.step_ns / 1e9, rel=0.5)


def test_a_vit_on_a_pc_is_answered(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["vit"]))
    words = ("--gpu", "rtx-4060-laptop", "--ram", "16GiB", "--ssd", "1TB", "--batch", "2")
    done = CliRunner().invoke(main, ["plan", "--model", str(tmp_path), *words])
    assert done.exit_code == 0, done.output
    first, second, *_ = done.output.splitlines()
    assert first.startswith("about ") and "patches/s" in first
    assert " fits: " in second and "2 images (" in done.output


def test_an_encoder_has_sequences_of_its_positions_unless_longer_ones_are_asked_for(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["bert"]))
    words = ["--gpu", "rtx-4060-laptop", "--ram", "16GiB", "--ssd", "1TB", "--batch", "2"]
    words = ["plan", "--model", str(tmp_path), *words]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0 and "a step of 2 x 512 tokens" in done.output, done.output
    done = CliRunner().invoke(main, [*words, "--seq", "1024"])
    assert done.exit_code == 2 and "has 512 positions: pass at most 512" in done.output


# --- Several GPUs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both() -> Any:
    words = ("--model", "opt-1.3b", "--batch", "1", "--seq", "128", "--json")
    parts = ("--gpu", "2x-rtx-3090", "--ram", "32GiB", "--ssd", "2TB,7GB/s,1200TBW")
    done = CliRunner().invoke(main, ["plan", *words, *parts])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_one_gpus_row_is_the_plan_without_several(both: Any) -> None:
    machine = _parts.machine("rtx-3090", "32GiB", "2TB,7GB/s,1200TBW")
    step = simulate(_models.load("opt-1.3b", 1, 128), machine, Options())
    assert both["one_gpu"]["step_s"] == step.step_ns / 1e9
    assert both["one_gpu"]["ssd_write_bytes"] == step.ssd_write_bytes


def test_the_same_tokens_are_compared(both: Any) -> None:
    same, rows = both["one_gpu_same_tokens"], both["rows"]
    assert {row["tokens"] for row in rows} == {same["tokens"]} == {2 * 128}
    assert (same["batch"], same["accumulate"]) in ((2, 1), (1, 2))
    best = min(row["step_s"] for row in rows if row["name"] == "lohan")
    assert best > same["step_s"] / 2.2, "two GPUs are not more than twice as fast"


@pytest.mark.parametrize(("batch", "seq"), [(1, 128), (16, 1024)])
def test_what_is_called_the_fastest_is_the_fastest_of_the_table(batch: int, seq: int) -> None:
    """A small batch is bound by the CPU, where a second GPU brings nothing; a large one is not."""
    machine = _parts.machine("rtx-3090", "128GiB", "2TB,7GB/s,1200TBW", 2)
    shown = io.StringIO()
    load = _world_show.Load("opt-1.3b", batch, seq)
    answer = _world_show.run(load, machine, Console(file=shown, width=200))
    alone, several = answer["one_gpu_same_tokens"], answer["rows"]
    best = max([alone, *several], key=lambda row: float(row["tokens_per_s"]))
    assert (best is alone) == (batch == 1) == answer["one_gpu_is_faster"]
    (said,) = [line for line in shown.getvalue().splitlines() if line.startswith("fastest: ")]
    if best is alone:
        assert said.startswith(f"fastest: one GPU, with batch {alone['batch']}: model = lohan.wr")
        assert f"accumulation_steps={alone['accumulate']}" in said or alone["accumulate"] == 1
    else:
        assert f"Parallel(share={best['share'] == 'on'}, " in said


def test_main_memory_keeps_states_with_several_gpus_too() -> None:
    model = _quick.sketch("qwen3-14b", 4, 1024)
    assert model is not None
    works = _several.works_of(model)
    times = []
    for memory in ("120GB", "250GB", "500GB"):
        machine = _machines.load("paper-3090")
        changes = (f"host_bytes={memory}", "gpu_count=2", "ssd_count=1")
        rows = _several.rows(model, works, _machines.change(machine, changes), _quick.step)
        times.append(min(row.step_s for row in rows))
    assert times[0] > 1.5 * times[1] >= 1.5 * times[2]
