"""A wrapped model's connection to its engine: hooks, rules of a step, commits, optimizer."""
