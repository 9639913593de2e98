"""A part of the sweep (tests/sweep): a class for each way in which files differ from models."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

SWEEP = pathlib.Path(__file__).parents[1] / "sweep" / "sweep.py"
STEPS = ("read", "frozen", "reference", "train", "saved", "exported")
CLASSES = (
    "AutoencoderKL",
    "BertForMaskedLM",
    "BertLMHeadModel",
    "BloomForCausalLM",
    "DeepseekV2ForCausalLM",
    "Dinov2ForImageClassification",
    "FSMTForConditionalGeneration",
    "GPT2LMHeadModel",
    "GptOssForCausalLM",
    "Inkling2ForCausalLM",
    "Kimi_K25ForConditionalGeneration",
    "KimiLinearForCausalLM",
    "LEDForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "MellumForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "OpenAIGPTLMHeadModel",
    "PaliGemmaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3MoeForCausalLM",
    "SD3Transformer2DModel",
    "SwinForImageClassification",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "Wav2Vec2ForCTC",
    "WhisperForConditionalGeneration",
)


@pytest.mark.slow
def test_one_class_of_each_kind_is_read_trained_and_written_as_its_library_does(
    store_dir: pathlib.Path,
) -> None:
    out = store_dir / "sweep.jsonl"
    command = [sys.executable, str(SWEEP), "--out", str(out), "--only", ",".join(CLASSES)]
    place = {"TMPDIR": str(store_dir), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env={**os.environ, **place}, stdout=subprocess.DEVNULL)
    rows = {row["class"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert sorted(rows) == sorted(CLASSES)
    wrong = {n: row for n, row in rows.items() if any(row.get(s) != "same" for s in STEPS)}
    assert wrong == {}
