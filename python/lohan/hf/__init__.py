"""The Hugging Face Trainer, its callback and its checkpoints."""
