"""LoRA on a transformer of Flux's shape, from latents and text embeddings that were computed once.

The base stays in its file, a single .safetensors, and is read a block at a time; the adapters are
saved in the form that FluxPipeline.load_lora_weights() reads. Only the lines with lohan differ from
a usual script.

python examples/11_flux_lora.py
"""

import tempfile
from pathlib import Path

import lohan
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.nn import functional

STEPS = 12
SIDE = 4  # tokens of a latent in a row
TEXT = 8  # tokens of a prompt
# Flux.1 has 19 and 38 blocks of 24 heads with 128 channels each.
CONFIG = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
    "guidance_embeds": True,
}
LORA = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"])


def make_base(path: Path) -> None:
    """Write a base with random weights to one file, in place of a downloaded one."""
    torch.manual_seed(0)
    save_file(FluxTransformer2DModel(**CONFIG).to(torch.bfloat16).state_dict(), path)


def make_cache(path: Path) -> None:
    """Write what the autoencoder and the text encoders would make of four images and prompts."""
    torch.manual_seed(1)
    latents, text = torch.randn(4, SIDE * SIDE, 16), torch.randn(4, TEXT, 32)
    save_file({"latents": latents, "text": text, "pooled": text.mean(1)}, path)


def predict(model: FluxTransformer2DModel, latents: torch.Tensor, cache: dict) -> torch.Tensor:
    """Return the predicted velocity of latents between image (0) and noise (1), here at 0.5."""
    rows = torch.arange(SIDE).repeat_interleave(SIDE)
    places = torch.stack([torch.zeros(SIDE * SIDE), rows, torch.arange(SIDE).repeat(SIDE)], dim=1)
    return model(
        hidden_states=latents.to(torch.bfloat16),
        timestep=cache["times"],
        guidance=torch.ones(len(latents)),
        encoder_hidden_states=cache["text"].to(torch.bfloat16),
        pooled_projections=cache["pooled"].to(torch.bfloat16),
        txt_ids=torch.zeros(TEXT, 3),
        img_ids=places,
    ).sample.float()


def main() -> None:
    """Train adapters, save them, and load them onto the plain base."""
    with tempfile.TemporaryDirectory() as folder:
        base, saved = Path(folder, "base.safetensors"), Path(folder, "adapters")
        make_base(base)
        make_cache(Path(folder, "cache.safetensors"))
        cache = load_file(Path(folder, "cache.safetensors"))

        with lohan.empty():
            model = FluxTransformer2DModel(**CONFIG).to(torch.bfloat16)
        model.requires_grad_(False)
        model.add_adapter(LORA)
        model.enable_gradient_checkpointing()
        optimizer = lohan.wrap(model, weights=base, lr=1e-2).optimizer
        for step in range(STEPS):
            torch.manual_seed(2)  # the same noise, so that the losses can be compared
            latents, noise = cache["latents"], torch.randn_like(cache["latents"])
            cache["times"] = torch.sigmoid(torch.randn(len(latents)))
            part = cache["times"].view(-1, 1, 1)
            found = predict(model, (1 - part) * latents + part * noise, cache)
            loss = functional.mse_loss(found, noise - latents)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.4f}")
        model.save_lora_adapter(saved)

        plain = FluxTransformer2DModel(**CONFIG).to(torch.bfloat16)
        plain.load_state_dict(load_file(base))
        plain.load_lora_adapter(saved, weight_name="pytorch_lora_weights.safetensors", prefix=None)
        with torch.no_grad():
            pair = [predict(each.eval(), cache["latents"], cache) for each in (model, plain)]
        print(f"adapters on the plain base: {'the same' if torch.equal(*pair) else 'different'}")


if __name__ == "__main__":
    main()
