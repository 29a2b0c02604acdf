"""What a user can say: a module a command, and what they share.

`lightning_cli` has the flags of fit, validate, test and predict, `trainer` what a Trainer is made of, `fit` what
training is besides. `parser` tells of wrong flags, `config_files` finds configs by name, `rates` settles a learning
rate that was given for another optimizer, `trust` says what a checkpoint may import. Our own commands are
`benchmark`, `by_hand`, `cache`, `demo`, `parity` and `sheet`. A new one is a module here and a row in `cli`.
"""
