"""The papers' systems beside lohan: plans, simulations and formulas that training does not need.

Benchmarks, docs/paper-results.md and their tests use them; they are not in the wheel.
"""
