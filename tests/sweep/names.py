"""The classes that the sweep tries, by kind, from the installed libraries' own tables."""

from __future__ import annotations

import inspect
from typing import Any

# The kinds of transformers, with the tables of its auto classes that list them.
_TABLES = {
    "causal language models": ["FOR_CAUSAL_LM"],
    "conditional generation": [
        "FOR_SEQ_TO_SEQ_CAUSAL_LM",
        "FOR_IMAGE_TEXT_TO_TEXT",
        "FOR_MULTIMODAL_LM",
    ],
    "masked language models": ["FOR_MASKED_LM"],
    "sequence classification": ["FOR_SEQUENCE_CLASSIFICATION"],
    "image classification": ["FOR_IMAGE_CLASSIFICATION"],
    "vision tasks": [
        "FOR_SEMANTIC_SEGMENTATION",
        "FOR_OBJECT_DETECTION",
        "FOR_DEPTH_ESTIMATION",
        "FOR_MASKED_IMAGE_MODELING",
        "FOR_VIDEO_CLASSIFICATION",
    ],
    "speech": [
        "FOR_SPEECH_SEQ_2_SEQ",
        "FOR_CTC",
        "FOR_AUDIO_CLASSIFICATION",
        "FOR_TEXT_TO_WAVEFORM",
    ],
    "backbones": ["FOR_BACKBONE"],
    "base models": [""],
}
# Bases of classes of diffusers that are no models of their own.
_ABSTRACT = ("ModelMixin", "AutoModel", "ControlNetOutput", "MultiControlNetModel")


def of_transformers() -> dict[str, list[str]]:
    """Return the names of the classes of each kind; each class once."""
    import transformers
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    made: dict[str, list[str]] = {}
    for kind, tables in _TABLES.items():
        names: set[str] = set()
        for table in tables:
            middle = f"_{table}" if table else ""
            for value in getattr(modeling_auto, f"MODEL{middle}_MAPPING_NAMES").values():
                names |= {*value} if isinstance(value, list | tuple) else {value}
        known = {name for name in names if hasattr(transformers, name)}
        made[kind] = sorted(known - seen)
        seen |= known
    return made


def of_diffusers() -> dict[str, list[str]]:
    """Return the names of diffusers' models: transformers, UNets, VAEs and the rest."""
    import diffusers
    import diffusers.models as models

    found: dict[str, list[str]] = {"diffusers: transformers": [], "diffusers: UNets": []}
    found |= {"diffusers: autoencoders": [], "diffusers: others": []}
    for name in dir(models):
        cls: Any = getattr(diffusers, name, None)
        if not inspect.isclass(cls) or name in _ABSTRACT or not hasattr(cls, "load_config"):
            continue
        if not issubclass(cls, models.modeling_utils.ModelMixin) or name.startswith("Flax"):
            continue
        kind = "others"
        if "Transformer" in name:
            kind = "transformers"
        elif "UNet" in name:
            kind = "UNets"
        elif name.startswith(("Autoencoder", "AsymmetricAutoencoder", "VQ", "ConsistencyDecoder")):
            kind = "autoencoders"
        found[f"diffusers: {kind}"].append(name)
    return found
