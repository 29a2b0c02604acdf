"""The command line, and the commands beside fit, validate, test and predict, which are in `finetune.fitting`.

- `places` says what positional arguments mean: folders, tables, addresses, runs and checkpoints. `error_lines` makes
  one line of every error.
- `check` finds faults of a data set. `review` opens a page on which people correct labels.
- `benchmark` measures a fit. `list_backbones` lists networks.
- `report` writes the report of a run, or a comparison of several. `runs` lists and deletes runs.
- `export` writes files for other programs. `serve` answers requests.
- `by_hand` trains in parallel without a framework. `parity` compares ways of using several devices.
- `cache` lists and removes caches and copies of images.
- `plain_table` is how tables are printed.

A new command is a function here that takes its settings, and a row in `finetune.settings.all_commands`.
"""
