"""The files of a run: writing them, reading them, and resuming from them.

The folder:
- `folder` is the folder of a run, with its config.yaml and about.json.
- `run_checkpoint` accepts a run's folder in the place of its best checkpoint.
- `run_search` finds the folders of runs. `run_table` reads a row for each run from its small files.
- `local_copies`, `run_upload` and `run_download` keep a run in object storage.
- `removal` deletes a run, or only what resuming needs. `checkpoint_parts` rewrites checkpoints without that.

Checkpoints:
- `model_checkpoint` decides when last.ckpt and best.ckpt are written, and stops a fit that has diverged.
- `deferred_checkpoints` holds checkpoints in memory if epochs are short.
- `best_epoch` decides which epoch is the best.
- `checkpoint_io` writes and reads checkpoints. `checkpoint_facts` records the run that a checkpoint is
  from, and checks that its weights fit a network.
- `exported_files` reads and writes the metadata of the files of `finetune export`.

Other files of a run:
- `metrics_csv`: metrics.csv and steps.csv.
- `results`: test.json or val.json, and skipped.txt. `outcome` is the result in a line.
- `predictions`: predictions.csv and test_predictions.csv. `prediction_rows` has their columns.
- `clock`: seconds.json.
- `interpolation_record`: kept_weights.json, the choice between the weights at the start and at the end.
- `side_files` reads small JSON files, and `result_file` test.json and val.json.

Resuming:
- `identity` is what a run is of, as it records when it begins, and finds the run to resume by that. `resume` continues
  it. `run_lock` admits one process at a time.
- `changes` compares the settings with those of the run, by the table of settings.
- `lightning_callbacks` restores Lightning's own callbacks, such as early stopping.

During a fit:
- `worse_than_start` warns if training makes the network worse.
- `run_logger` is the base of `tensorboard_logger`, `wandb_logger` and `mlflow_logger`.

Reading a run:
- `record` reads the whole folder, `predictions_table` the predictions for the test images. `tested_images` names these
  as other runs may, too. `headline` is the result in one sentence, and `statistics` has intervals and curves.
- `licence` states the licence of the weights that training started from.

Another file of a run gets a module here, and so does another logger. Pages are in `reports`.
"""
