"""LoRA with peft: the base weights stay in their files, and adapters are trained.

lohan adds only an import and the line that creates the optimizer. The base model is read from its
folder, a block at a time, and never written.

python examples/04_lora.py
"""

import tempfile
from pathlib import Path

import lohan
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

STEPS = 8
TEXT = Path(tempfile.__file__).read_bytes()  # the training data: a Python module, byte by byte


def make_base(folder: str) -> None:
    """Write a small base model with random weights, in place of a downloaded one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "ffn_dim": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = OPTConfig(**sizes, word_embed_proj_dim=128, vocab_size=256, dropout=0.0)
    OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def batch(step: int) -> torch.Tensor:
    """Return four pieces of the text."""
    starts = torch.randint(0, len(TEXT) - 64, (4,), generator=torch.Generator().manual_seed(step))
    return torch.stack([torch.tensor(list(TEXT[start : start + 64])) for start in starts.tolist()])


def main() -> None:
    """Train adapters, save them, and load them onto the plain base model."""
    with tempfile.TemporaryDirectory() as folder:
        make_base(f"{folder}/base")
        base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.bfloat16)
        torch.manual_seed(1)
        config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
        optimizer = lohan.wrap(model, weights=f"{folder}/base", lr=5e-3).optimizer
        for step in range(STEPS):
            tokens = batch(step)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.4f}")
        model.save_pretrained(f"{folder}/adapters")

        plain = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.bfloat16)
        tuned = PeftModel.from_pretrained(plain, f"{folder}/adapters")
        tokens = batch(STEPS)
        with torch.no_grad():
            model.eval()
            same = torch.equal(model(input_ids=tokens).logits, tuned(input_ids=tokens).logits)
        print(f"adapters on the plain base: {'the same' if same else 'different'} outputs")


if __name__ == "__main__":
    main()
