"""Where a fit's time goes.

`recorder` measures a fit from inside, `step_timing` the parts of a step; `summary` says it in words, and what would
help. `time_trial` is for a fit that has yet to begin: what its parts take, by a `stopwatch` in some of its steps;
`fit_length` is how long it can be then to end in time. `precision_trial` chooses between bf16 and float32 on a CPU by
timed steps.
"""
