"""The commands: a module for each of our own, and the modules that all commands share.

Before torch is imported, the command line is read and checked. `command_line` replaces short words by full flags.
`parsed_line` parses it into flags and positional arguments. `flag_checks` expands shorthands such as `--wandb` and
refuses wrong flags, with the messages of `suggestions`. `flow_yaml` writes values as YAML. `explicit_settings` reads
which settings configs and flags give. `run_places` resolves addresses of runs in object storage. `options` has the
table of options that all these and `help_pages` use.
`all_options` is the page of `--help all`.

`lightning_cli` is fit, validate, test and predict. `lightning_flags` has the flags that these take in addition to
Lightning's. `plan` is the state that a fit starts from. `settle` makes the plan and the settings that depend on it, in
one order: `resumption` finds the run of `--resume` and checks `--name`, `dependent_defaults` sets defaults that depend
on other settings, such as the learning rate of an optimizer, `early_values` checks values, `backbone_choice` chooses
among several networks by the images, and `minutes` chooses a length that ends in time. `trainer` makes the
arguments of the Trainer. `fit` prepares, trains, tests and reports, after the checks of `fit_checks`. `best_weights`
chooses the weights of best.ckpt, and `fit_summary` prints the result. `cross_validation` runs a fit for each fold;
`fold_search` decides whether a fit is one, and which one it continues, `fold_data` checks that the images can be split
into folds, and `fold_results` joins the results.

`parser` reports wrong keys and values, `error_lines` all other errors. `config_files` finds configs by name and
replaces their short words, `logger_names` finds loggers by name. `logged_sheet` draws test images for loggers. `trust`
decides which modules a checkpoint may import.

Our own commands: `benchmark` measures a fit, `by_hand` trains in parallel without a framework, `cache` lists and
removes caches, `list_backbones` lists networks, `check` finds faults of a data set, `export` writes files for other
programs, `parity` compares ways of using several devices, `push` uploads a model to the Hugging Face hub, `report`
writes the report of a run or compares several, `review` opens a page on which people correct labels, `runs` lists and
deletes runs, `serve` answers requests, `sheet` draws a contact sheet of predicted images.

A new command is a module here and a row in `cli`. It reads flags, calls lower packages and prints.
"""
