"""AdamW in several processes, each of which has all states and exchanges gradients."""
