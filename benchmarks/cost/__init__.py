"""Parts of ``benchmarks/step_cost.py``: nets, contestants, measuring, reporting."""
