"""Measuring and predicting the time of a fit.

For `finetune benchmark`:
- `recorder` measures the steps of a fit.
- `summary` reports the result as text.

Before a fit:
- `time_trial` measures the costs of a fit by a trial of some steps, with the `stopwatch` callback.
- `fit_length` computes from these costs how long the fit can be to end in time (`--minutes`).

Both use the clocks of `step_timing`.
"""
