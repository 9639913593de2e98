"""Inputs for a model of any class, from its configuration and the arguments of its forward."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn

LENGTH = 12


def _field(config: Any, *names: str, default: Any = None) -> Any:
    """Return a field of a configuration or of one inside it."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    inner = [v for k, v in vars(config).items() if hasattr(v, "to_dict") and not k.startswith("_")]
    for each in inner:
        value = _field(each, *names)
        if value is not None:
            return value
    return default


def _ids(config: Any, rng: torch.Generator, rows: int, columns: int = LENGTH) -> torch.Tensor:
    size = _field(config, "vocab_size", "text_vocab_size", default=64)
    special = {
        v
        for holder in [config, *vars(config).values()]
        if hasattr(holder, "to_dict")
        for k, v in vars(holder).items()
        if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)
    }
    allowed = [n for n in range(3, min(size, 200)) if n not in special] or [0]
    picks = torch.randint(0, len(allowed), (rows, columns), generator=rng)
    return torch.tensor(allowed)[picks]


def token_of(config: Any, kind: str) -> int | None:
    """Return the token that stands for a part of a picture, a video or a sound."""
    value = _field(config, f"{kind}_token_id", f"{kind}_token_index")
    return value if isinstance(value, int) else None


def _picture(config: Any, rng: torch.Generator) -> torch.Tensor:
    size = _field(config, "image_size", "img_size", "input_image_size", "crop_size", default=64)
    size = size if isinstance(size, list | tuple) else (size, size)
    channels = _field(config, "num_channels", "in_channels", "in_chans", default=3)
    return torch.randn((1, channels, *size), generator=rng)


def guess(name: str, model: nn.Module, config: Any, seed: int) -> Any:
    """Return a value for an argument of the forward, or None if its name is not known."""
    if type(model).__module__.startswith("diffusers."):
        return _of_diffusers(name, config, seed)
    rng = torch.Generator().manual_seed(seed)
    frames = _field(config, "num_frames", default=4)
    match name:
        case "input_ids" | "decoder_input_ids":
            return _ids(config, rng, 2)
        case "attention_mask" | "decoder_attention_mask":
            return torch.ones(2, LENGTH, dtype=torch.long)
        case "pixel_values":
            return _picture(config, rng)
        case "pixel_values_videos" | "videos":
            return _picture(config, rng).unsqueeze(1).repeat(1, frames, 1, 1, 1)
        case "input_values":
            return torch.randn(1, 6400, generator=rng)
        case "input_features" | "spectrogram":
            mels = _field(
                config, "num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel"
            )
            length = 2 * _field(config, "max_source_positions", default=32)
            return torch.randn(1, mels or 80, length, generator=rng)
        case "bbox":
            return torch.zeros(2, LENGTH, 4, dtype=torch.long)
        case "audio_values" | "waveform" | "audio":
            return torch.randn(1, 1, 6400, generator=rng)
        case "past_values":
            length = _field(config, "context_length", default=32)
            return torch.randn(
                2, length, _field(config, "num_input_channels", default=1), generator=rng
            )
        case "hidden_states" | "sample" | "inputs_embeds":
            width = _field(config, "hidden_size", "d_model", default=64)
            return torch.randn(2, LENGTH, width, generator=rng)
        case "encoder_hidden_states":
            width = _field(config, "cross_attention_dim", "hidden_size", "d_model", default=64)
            return torch.randn(2, LENGTH, width, generator=rng)
        case "labels":
            return torch.zeros(2, dtype=torch.long)
        case "query_embeds" | "states" | "state" | "actions" | "rewards" | "returns_to_go":
            names = {"states": "state_dim", "state": "max_state_dim", "actions": "act_dim"}
            width = _field(config, names.get(name, "hidden_size"), default=1)
            width = 1 if name in ("rewards", "returns_to_go") else width
            return torch.randn(2, LENGTH, width, generator=rng)
        case "timesteps":
            return torch.arange(LENGTH).repeat(2, 1)
        case "flattened_patches":
            patch = _field(config, "patch_embed_hidden_size", default=768)
            return torch.randn(2, LENGTH, patch + 2, generator=rng).abs().ceil()
        case "grid_thw" | "image_grid_thw":
            return torch.tensor([[1, 4, 4]])
        case "pixel_attention_mask" | "input_features_mask" | "padding_mask":
            return None
    return None


def candidates(model: nn.Module, config: Any, seed: int) -> list[dict[str, Any]]:
    """Return inputs to try, the most natural ones first."""
    if type(model).__module__.startswith("diffusers."):
        return of_diffusers(model, config, seed)
    known = inspect.signature(model.forward).parameters
    required = [
        name
        for name, each in known.items()
        if each.default is inspect.Parameter.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    main = getattr(model, "main_input_name", "input_ids")

    def make(*names: str) -> dict[str, Any]:
        made = {}
        for name in dict.fromkeys(names):
            value = guess(name, model, config, seed)
            if value is not None and (name in known or name in required):
                made[name] = value
        return made

    tries = [make(main, *required)]
    for more in (
        ("input_ids",),
        ("decoder_input_ids",),
        ("input_ids", "decoder_input_ids"),
        ("pixel_values",),
        ("input_ids", "pixel_values"),
        ("input_ids", "bbox"),
        ("input_features", "decoder_input_ids"),
        ("input_values", "decoder_input_ids"),
        ("pixel_values", "decoder_input_ids"),
        ("input_ids", "attention_mask"),
    ):
        tries.append(make(main, *required, *more))
    tries.append(make("input_ids"))
    features = guess("input_features", model, config, seed)
    if features is not None and "input_features" in known:
        for shaped in (features.transpose(1, 2), features.transpose(1, 2)[:, :64]):
            tries.append({**make(main, *required), "input_features": shaped.contiguous()})
            extra = make(main, *required, "decoder_input_ids")
            tries.append({**extra, "input_features": shaped.contiguous()})
    if "input_ids" in known:
        rng = torch.Generator().manual_seed(seed)
        books = _field(config, "num_codebooks", default=1)
        if books > 1:
            tries.append({**make(main, *required), "input_ids": _ids(config, rng, 2 * books)})
        last = _field(config, "eos_token_id")
        if isinstance(last, int):
            ids = torch.cat([_ids(config, rng, 2), torch.full((2, 1), last)], dim=1)
            tries.append({**make(main, *required), "input_ids": ids})
        tries.append({**make(main, *required), "input_ids": _ids(config, rng, 1)})
        if "pixel_values" in known:
            tries.append(make("pixel_values", "input_ids", *required))
    if "input_values" in known:
        size = _field(config, "max_length", default=64), _field(config, "num_mel_bins", default=64)
        rng = torch.Generator().manual_seed(seed)
        tries.append({"input_values": torch.randn(1, *size, generator=rng)})
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, dict):
        tries.append(dict(dummy))
    seen, unique = set(), []
    for each in tries:
        key = tuple((k, tuple(v.shape)) for k, v in sorted(each.items()) if hasattr(v, "shape"))
        if each and key not in seen:
            seen.add(key)
            unique.append(each)
    return unique


def _of_diffusers(name: str, config: Any, seed: int) -> Any:
    """Return a value for an argument of a model of diffusers, or None if its name is not known."""
    rng = torch.Generator().manual_seed(seed)
    width = _field(config, *_WIDTHS, default=32)
    width = width[0] if isinstance(width, list | tuple) else width
    width = width if isinstance(width, int) else 32
    size = _sample_size(config)
    axes = _field(config, "axes_dims_rope", "axes_dim", "axes_dims", default=(0, 0, 0))
    axes = len(axes) if isinstance(axes, list | tuple) else 3
    fixed: dict[str, Any] = {
        "guidance": torch.tensor([1.0]),
        "class_labels": torch.tensor([1]),
        "img_shapes": [[(1, 4, 4)]],
        "txt_seq_lens": [4],
        "num_frames": 1,
        "height": 4,
        "width": 4,
        "fps": torch.tensor([8]),
        "added_time_ids": torch.ones(1, 3),
        "input_ids": torch.arange(16)[None],
        "conditioning_scale": 1.0,
    }
    if name in fixed:
        return fixed[name]
    if re.fullmatch(r"timesteps?|timestep_r|r|sigma", name):
        return torch.tensor([1])
    if re.search(r"mask$", name):
        return torch.ones(1, 4, dtype=torch.bool)
    if re.search(r"^(img|image)_ids$|latent_ids$", name):
        return torch.zeros(16, axes)
    if re.search(r"^(txt|text)_ids$", name):
        return torch.zeros(4, axes)
    if re.search(r"pooled|^(clip_)?text_embeds?$|proj_embedding|image_embeddings", name):
        wide = _field(config, "pooled_projection_dim", "embedding_dim", default=width)
        return torch.randn(1, wide, generator=rng)
    if re.search(r"(original|target)_size|crop_coords", name):
        return torch.tensor([[16.0, 16.0]])
    if re.search(r"^(encoder_hidden_states|text|context|prompt|caption|cap_feats)", name):
        return torch.randn(1, 4, width, generator=rng)
    if re.search(r"^(controlnet_cond|condition)", name):
        return torch.randn(1, 3, 8 * size, 8 * size, generator=rng)
    return None


_WIDTHS = ("cross_attention_dim", "joint_attention_dim", "caption_channels", "text_embed_dim")
_WIDTHS += ("text_dim", "encoder_hid_dim", "text_in_channels", "context_dim", "cap_feat_dim")
_MAIN = ("sample", "hidden_states", "x", "audio", "audio_values", "waveform")


def _sample_size(config: Any) -> int:
    size = _field(config, "sample_size", default=16)
    size = size[0] if isinstance(size, list | tuple) else size
    return size if isinstance(size, int) and size <= 64 else 16


def of_diffusers(model: nn.Module, config: Any, seed: int) -> list[dict[str, Any]]:
    """Return inputs to try for a model of diffusers."""
    rng = torch.Generator().manual_seed(seed)
    known = inspect.signature(model.forward).parameters
    required = [
        name
        for name, each in known.items()
        if each.default is inspect.Parameter.empty and each.kind == each.POSITIONAL_OR_KEYWORD
    ]
    plain = {name: _of_diffusers(name, config, seed) for name in known}
    plain = {name: each for name, each in plain.items() if each is not None}
    if any(name not in plain and name not in _MAIN for name in required):
        return []
    channels = _field(config, "in_channels", "latent_channels", default=4)
    channels = channels if isinstance(channels, int) else 4
    size = _sample_size(config)
    tries = []
    for shape in (
        (1, channels, size, size),
        (1, channels, 16, 16),
        (1, channels, 5, 16, 16),
        (1, 16, channels),
        (1, channels, 32),
        (1, channels, 1, 16, 16),
    ):
        value = torch.randn(shape, generator=rng)
        given = {name: plain[name] if name in plain else value for name in required}
        main = next((name for name in known if name in _MAIN), None)
        if main:
            given[main] = value
        tries += [given, {**plain, **given}]
        masks = {name for name in plain if name.endswith("mask")} - {*required}
        if masks:  # those of the text's length do not fit a class that masks the picture
            tries.append({name: v for name, v in tries[-1].items() if name not in masks})
    return tries


def floats(value: Any) -> list[torch.Tensor]:
    """Return all tensors of floating point in a model's output, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [t for each in value.values() for t in floats(each)]
    if isinstance(value, list | tuple):
        return [t for each in value for t in floats(each)]
    return []
