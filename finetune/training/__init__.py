"""What learns, and how.

`classifier` is the LightningModule: every hook is there. `task` is what the labels of images mean: the `loss`,
metrics, decisions and calibration. `param_groups` say how fast what learns learns, `lr_schedulers` how that changes,
`fused_optimizers` make the update one pass over memory. `metrics` are exact on any number of devices
(`precise_sums`), `dropout` is the same on any. `calibration` makes probabilities and decisions of logits, by a
`temperature` and, of two classes, a `threshold` that the validation split gives. `interpolation` chooses weights
between the start of a fit and its end. `precision` is the arithmetic, `compile` the network in faster forms,
`initial_weights` are those that a fit starts from, `checkpoint_keys` are those of the state dict. `run_length` says
how many epochs a fit has where nobody does, `time_budget` how many there is time for, `run_limits` how many steps the
limits of a Trainer leave. Before training `first_pass` checks whether the network can train on such pictures, and
`overview` tells what is read and what is doubtful about it; `progress_bar` shows how it goes, `augmented_sheet` draws
what it saw. `checkpoint_settings` takes a classifier's arguments out of a checkpoint.

A loss, an average of weights, a schedule, a search for a rate go here; a callback lies with its subject.
"""
