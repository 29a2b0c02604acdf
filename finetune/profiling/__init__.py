"""Measuring and predicting the time of a fit.

- `throughput` measures the steps of a fit, for `finetune benchmark`.
- `time_budget` measures the beginning of a fit, and computes how long it can be to end in time (`--minutes`).
"""
