"""Measuring and predicting the time of a fit.

For `finetune benchmark`:
- `recorder` measures the steps of a fit, and `step_timing` the parts of a step.
- `summary` reports the result as text, with advice.

Before a fit:
- `time_trial` measures the costs of a fit by a trial of some steps, with the `stopwatch` callback.
- `fit_length` computes from these costs how long the fit can be to end in time (`--minutes`).
- `precision_trial` chooses between bf16 and float32 on a CPU by timed steps.
"""
