"""What a user can say: a module for each command of our own, and what all commands share.

Before torch is imported, `command_line` turns what is typed into full flags: `given_arguments` takes it apart,
`flag_checks` replaces shorthands such as `--wandb` and refuses wrong flags in the words of `suggestions`, `flow_yaml`
writes values as the parser reads them, and `said` reads which settings configs and flags give, in one spelling.
`options` has the table of options that all these and `help_pages` use.

`lightning_cli` is fit, validate, test and predict, `lightning_flags` what these take besides Lightning's own; `plan`
is what a fit goes on from, and `settle` decides it and the settings that depend on it, in one order: `resumption`
finds the run of `--resume`, `run_name` checks `--name`, then come the modules below. `trainer` has what a Trainer is
made of; `fit` prepares, trains, tests and reports, after `early_values` and `fit_checks`, and `kept_weights` chooses
the weights of best.ckpt. `parser` tells of wrong keys and values, `error_lines` of all else, `config_files` finds
configs by name, `default_rates` gives another optimizer its usual learning rate, `preparation` prepares pictures as
weights of timm's say, `backbone_choice` chooses among several networks by the images, `minutes` chooses a length that
ends in time, `trust` says what a checkpoint may import. `logger_names` finds loggers by name, `logged_sheet` draws
test pictures for them. Our own: `benchmark` measures a fit, `by_hand` trains in parallel without a framework, `cache`
lists what is kept, `check` says what is wrong with a data set, `export` writes files for other programs, `parity`
compares ways of using devices, `report` writes the page of a run or compares several, `runs` lists and deletes them,
`serve` answers requests, `sheet` draws predicted pictures on one page.

A new command is a module here and a row in `cli`. It reads flags, calls and prints; what it calls lies below.
"""
