"""A language model whose logits never exist: the hidden states and the head go into the loss.

The body of the model is called instead of the model, and `linear_cross_entropy` reads the weight of
the head, which lohan brings in for it.

python examples/10_loss_without_logits.py
"""

import tempfile

import lohan
import torch
import torch.nn.functional as F
from lohan.losses import linear_cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=5000,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
)


def main() -> None:
    """Learn a sequence by heart."""
    torch.manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 64))
    # The last token of a row has no target.
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
    with tempfile.TemporaryDirectory() as store:
        model = lohan.wrap(LlamaForCausalLM(CONFIG), store=store, lr=3e-3)
        with torch.no_grad():
            usual = model(input_ids=tokens, labels=tokens).loss
        for step in range(30):
            hidden = model.model(input_ids=tokens).last_hidden_state
            loss = linear_cross_entropy(hidden, model.lm_head.weight, targets)
            loss.backward()
            model.optimizer.step()
            if step == 0:
                torch.testing.assert_close(loss.detach(), usual)
            if step % 10 == 0 or step == 29:
                print(f"step {step:3d}  loss {loss.item():.4f}")
        model.lohan.close()
    assert loss.item() < 0.5 * usual.item(), "the model did not learn"


if __name__ == "__main__":
    main()
