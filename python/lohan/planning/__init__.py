"""Machines, models and policies: which activations are kept, offloaded or recomputed."""
