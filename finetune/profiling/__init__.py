"""Where a fit's time goes.

`recorder` measures a fit from inside, `step_timing` its parts and a plain loop beside it, `roofline` the least time
that a step can take; `summary` says it in words, and what would help.
"""
