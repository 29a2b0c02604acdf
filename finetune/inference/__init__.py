"""From a checkpoint to answers, without a Trainer.

`predictor` is a checkpoint as a function: pictures in, probabilities out. (`finetune predict` answers for very many
pictures on any number of devices, by a Trainer: `runs/predictions`.)

What serves or exports a checkpoint goes here, each held against the predictor; what corrects its probabilities, too.
"""
