"""The training demo: a tiny mixture-of-experts model learns a task by GRPO over a real fleet, on a laptop CPU.

`grpo.py` is the whole loop in one readable file; the rest starts the fleet, keeps the arrays and draws the report.
"""
