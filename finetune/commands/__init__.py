"""The commands: a module for each of our own, and the modules that all commands share.

The command line, before torch is imported:
- `options` has the table of options, which all modules of this part use.
- `command_line` replaces short words and positional arguments by full flags. `parsed_line` parses it.
- `flag_checks` expands shorthands such as `--logger wandb`, and refuses wrong flags with the messages of `suggestions`.
- `explicit_settings` reads which settings configs and flags give. `config_files` finds configs by name and replaces
  their short words. `names` keeps settings that are names as text. `flow_yaml` writes values as YAML.
- `run_places` resolves addresses of runs in object storage.
- `help_pages` has the help of the commands. `all_options` is the page of `--help all`.
- `fold_search` decides whether a fit is a cross-validation, and which one it continues.

Fit, validate, test and predict:
- `lightning_cli` is their command line. `lightning_flags` has the flags that they take in addition to Lightning's.
- `trainer` makes the arguments of the Trainer. `logger_names` finds loggers by name.
- `trust` decides which modules a checkpoint may import.

A fit:
- `plan` is the state that it starts from. `settle` makes the plan and the settings that depend on it, in one order:
  `resumption` finds the run of `--resume` and checks `--name`; `dependent_defaults` sets defaults that depend on other
  settings, such as the learning rate of an optimizer; `early_values` checks values; `backbone_choice` chooses among
  several networks by the images; `minutes` chooses a length that ends in time.
- `fit` prepares, trains, tests and reports, after the checks of `fit_checks`. `best_weights` chooses the weights of
  best.ckpt.
- `cross_validation` runs a fit for each fold. `fold_data` checks that the images can be split into folds, and
  `fold_results` joins the results.

Our own commands:
- `benchmark` measures a fit.
- `by_hand` trains in parallel without a framework. `parity` compares ways of using several devices.
- `cache` lists and removes caches of decoded images.
- `check` finds faults of a data set. `review` opens a page on which people correct labels.
- `export` writes files for other programs: `export_verification` compares them with the checkpoint, and
  `export_target` puts them in place.
- `serve` answers requests.
- `list_backbones` lists networks.
- `report` writes the report of a run, or a comparison of several. `runs` lists and deletes runs.

All of them: `parser` reports wrong keys and values, `error_lines` all other errors. `plain_table` is how tables are
printed, and `contact_sheet` draws predicted images for notebooks.

A new command is a module here and a row in `cli`. It reads flags, calls lower packages and prints.
"""
