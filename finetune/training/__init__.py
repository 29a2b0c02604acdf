"""What learns, and how.

`classifier` is the LightningModule. `param_groups` say how fast what learns learns, `lr_schedulers` how that changes,
`fused_optimizers` make the update one pass over memory. `metrics` are exact on any number of devices, `dropout` is
the same on any. `precision` is the arithmetic, `compile` the network in faster forms. `first_pass` and `overview`
look at network and pictures before all else, `progress_bar` shows how it goes, `checkpoint_settings` takes a
classifier's arguments out of a checkpoint.
"""
