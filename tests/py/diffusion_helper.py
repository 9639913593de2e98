"""Tiny diffusion transformers of several families, their cached batches, and loops in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import kit as helper
import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from peft import LoraConfig
from torch import nn

BATCH = 2
TEXT = 8  # tokens of a prompt
WIDTH = 24  # features of a prompt's embedding
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4}


def positions(height: int, width: int) -> torch.Tensor:
    """Return the positions of a latent's tokens, as FluxPipeline makes them."""
    made = torch.zeros(height, width, 3)
    made[..., 1] += torch.arange(height)[:, None]
    made[..., 2] += torch.arange(width)[None, :]
    return made.reshape(-1, 3)


def flux() -> nn.Module:
    return FluxTransformer2DModel(
        **HEADS,
        in_channels=16,
        num_single_layers=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def call_flux(model: nn.Module, batch: Batch) -> torch.Tensor:
    guidance = torch.full((BATCH,), 3.5)
    found: torch.Tensor = model(
        hidden_states=batch.noised,
        timestep=batch.times,
        guidance=guidance,
        encoder_hidden_states=batch.text,
        pooled_projections=batch.text[:, 0],
        txt_ids=torch.zeros(TEXT, 3),
        img_ids=positions(4, 4),
    ).sample
    return found


def sd3() -> nn.Module:
    return SD3Transformer2DModel(
        **HEADS,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def call_sd3(model: nn.Module, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = model(
        hidden_states=batch.noised,
        timestep=1000 * batch.times,
        encoder_hidden_states=batch.text,
        pooled_projections=batch.text[:, 0],
    ).sample
    return found


def qwen() -> nn.Module:
    return QwenImageTransformer2DModel(
        **HEADS,
        in_channels=16,
        out_channels=4,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )


def call_qwen(model: nn.Module, batch: Batch) -> torch.Tensor:
    mask = torch.ones(BATCH, TEXT, dtype=torch.bool)
    mask[0, 5:] = False  # prompts of different lengths
    found: torch.Tensor = model(
        hidden_states=batch.noised,
        timestep=batch.times,
        encoder_hidden_states=batch.text,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, 4, 4)]] * BATCH,
    ).sample
    return found


def z_image() -> nn.Module:
    return ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 16, 16],
    )


def call_z_image(model: nn.Module, batch: Batch) -> torch.Tensor:
    latents = [each[:, None] for each in batch.noised]  # with an axis of frames
    prompts = [batch.text[0], batch.text[1, :5]]  # of different lengths
    found = model(latents, 1 - batch.times, prompts).sample
    return -torch.stack([each[:, 0] for each in found])


def wan() -> nn.Module:
    return WanTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, text_dim=WIDTH, freq_dim=32, ffn_dim=64
    )


def call_wan(model: nn.Module, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = model(
        hidden_states=batch.noised,
        timestep=1000 * batch.times,
        encoder_hidden_states=batch.text,
    ).sample
    return found


@dataclasses.dataclass
class Batch:
    """A batch at one point between latents and noise."""

    noised: torch.Tensor
    times: torch.Tensor  # 0: latents, 1: noise
    text: torch.Tensor
    target: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model: how it is built and called, and the shape of its latents."""

    build: Callable[[], nn.Module]
    call: Callable[[nn.Module, Batch], torch.Tensor]
    shape: tuple[int, ...]
    targets: Sequence[str] = ("to_q", "to_k", "to_v", "to_out.0")

    def batch(self, step: int, dtype: torch.dtype = torch.float32) -> Batch:
        """Return the batch of a step: cached latents and embeddings, with noise for this step."""
        cache = torch.Generator().manual_seed(step % 2)
        latents = torch.randn(BATCH, *self.shape, generator=cache)
        text = torch.randn(BATCH, TEXT, WIDTH, generator=cache)
        own = torch.Generator().manual_seed(100 + step)
        noise = torch.randn(latents.shape, generator=own)
        times = torch.sigmoid(torch.randn(BATCH, generator=own))
        part = times.view(BATCH, *(1 for _ in self.shape))
        noised = (1 - part) * latents + part * noise
        return Batch(noised.to(dtype), times, text.to(dtype), noise - latents)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the flow-matching loss of a step: the error of the predicted velocity."""
        is_half = any(param.dtype == torch.bfloat16 for param in model.parameters())
        dtype = torch.bfloat16 if is_half else torch.float32
        batch = self.batch(step, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            found = self.call(model, batch)
        return (found.float() - batch.target).square().mean()


FAMILIES = {
    "flux": Family(flux, call_flux, (16, 16)),
    "sd3": Family(sd3, call_sd3, (4, 8, 8)),
    "qwen": Family(qwen, call_qwen, (16, 16)),
    "z_image": Family(z_image, call_z_image, (4, 8, 8)),
    "wan": Family(wan, call_wan, (4, 3, 8, 8)),
}


def build(name: str, kind: str = "full") -> nn.Module:
    """Return a model of a family with the same values every time.

    Args:
        name: a key of FAMILIES.
        kind: "full" or "bf16", all parameters are trained; "lora": adapters in fp32 on bf16.
    """
    torch.manual_seed(0)
    model = FAMILIES[name].build()
    for param in model.parameters():
        if not param.any():  # the last layer of some families
            nn.init.normal_(param, std=0.02)
    if kind != "full":
        halve(model)
    if kind == "lora":
        adapt(model, name)
    return model.train()


def halve(model: nn.Module) -> None:
    """Make parameters bf16 as from_pretrained does, which keeps those that a class names."""
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for name, param in model.named_parameters():
        if not kept & {*name.split(".")}:
            param.data = param.data.to(torch.bfloat16)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(torch.bfloat16)


def adapt(model: nn.Module, name: str) -> None:
    """Add adapters as the training scripts of diffusers do, and train them in fp32."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    model.add_adapter(
        LoraConfig(r=4, init_lora_weights="gaussian", target_modules=[*FAMILIES[name].targets])
    )
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.float()


def by_hand(model: nn.Module, steps: Sequence[int], family: Family) -> helper.Trained:
    """Train a model in memory, with autograd's gradients and one call of lohan's kernel each."""
    states = {p: helper.State.of(p.data) for p in model.parameters() if p.requires_grad}
    losses = []
    for step in steps:
        loss = family.loss(model, step)
        loss.backward()
        losses.append(loss.item())
        for param, state in states.items():
            if param.grad is not None:  # as in torch, a parameter without a gradient stays
                state.update(param.grad)
                param.grad = None
    return helper.Trained(losses, {k: v.clone() for k, v in model.state_dict().items()})


def by_torch(model: nn.Module, steps: Sequence[int], family: Family) -> helper.Trained:
    """Train a model in memory with torch.optim.AdamW."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **helper.HYPER)
    losses = []
    for step in steps:
        loss = family.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return helper.Trained(losses, {k: v.clone() for k, v in model.state_dict().items()})
