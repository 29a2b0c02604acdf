"""From a checkpoint to answers, without a Trainer.

`predictor` is a checkpoint as a function: pictures in, probabilities out. (`finetune predict` answers for very many
pictures on any number of devices, by a Trainer: `runs/predictions`.) `lens` looks at pictures as it does, and shows
where in them its network saw a class, by `class_activation`.

What serves or exports a checkpoint goes here, each held against the predictor; what corrects its probabilities, too.
"""
