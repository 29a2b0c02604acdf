"""From a checkpoint to answers.

`predictor` is a checkpoint as a function: pictures in, probabilities out.
"""
