"""Activations of a wrapped model: keeping, offloading and recomputing them, and profiling."""
