"""Inputs for a model of any class, from its configuration and the arguments of its forward."""

from __future__ import annotations

import inspect
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


def _picture(config: Any, rng: torch.Generator) -> torch.Tensor:
    size = _field(config, "image_size", "img_size", "input_image_size", "crop_size", default=32)
    size = size if isinstance(size, list | tuple) else (size, size)
    channels = _field(config, "num_channels", "in_channels", "in_chans", default=3)
    return torch.randn((1, channels, *size), generator=rng)


def guess(name: str, model: nn.Module, config: Any, seed: int) -> torch.Tensor | None:
    """Return a value for an argument of the forward, or None if its name is not known."""
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


def of_diffusers(model: nn.Module, config: Any, seed: int) -> list[dict[str, Any]]:
    """Return inputs to try for a model of diffusers."""
    rng = torch.Generator().manual_seed(seed)
    required = [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.default is inspect.Parameter.empty and each.kind == each.POSITIONAL_OR_KEYWORD
    ]
    channels = _field(config, "in_channels", "latent_channels", default=4)
    widths = "cross_attention_dim", "joint_attention_dim", "caption_channels", "text_embed_dim"
    width = _field(config, *widths, "text_dim", "encoder_hid_dim", default=32)
    width = width[0] if isinstance(width, list | tuple) else width
    size = _field(config, "sample_size", default=16)
    size = size if isinstance(size, int) else size[0]
    shapes = [(1, channels, size, size), (1, channels, 16, 16), (1, channels, 5, 16, 16)]
    shapes += [(1, 16, channels), (1, channels, 32), (1, channels, 1, 16, 16)]
    plain: dict[str, Any] = {
        "timestep": torch.tensor([1]),
        "timesteps": torch.tensor([1]),
        "encoder_hidden_states": torch.randn(1, 4, width, generator=rng),
        "encoder_attention_mask": torch.ones(1, 4, dtype=torch.bool),
        "pooled_projections": torch.randn(
            1, _field(config, "pooled_projection_dim", default=32), generator=rng
        ),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(4, 3),
        "guidance": torch.tensor([1.0]),
        "class_labels": torch.tensor([1]),
        "controlnet_cond": torch.randn(1, 3, 8 * size, 8 * size, generator=rng),
    }
    known = inspect.signature(model.forward).parameters
    tries = []
    for shape in shapes:
        value = torch.randn(shape, generator=rng)
        given = {name: plain.get(name, value) for name in required}
        if any(name not in ("sample", "hidden_states", "x", *plain) for name in required):
            continue
        tries.append(given)
        more = {name: each for name, each in plain.items() if name in known}
        tries.append({**more, **given})
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
