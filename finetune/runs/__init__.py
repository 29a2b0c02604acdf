"""The files of a run: writing them and reading them.

The folder:
- `run_dir` owns the folder of a run and its record, run.json, and finds runs. `run_table` has a row for each run.
- `folder` creates the folder of a command's run.
- `run_checkpoint` accepts a run's folder in the place of its best checkpoint.
- `sync` keeps a run in object storage, and `local_copies` names its folders on this machine.
- `removal` deletes a run, or only what resuming needs.

Checkpoints:
- `model_checkpoint` decides when last.ckpt and best.ckpt are written, and ends a fit by `--patience` or a signal.
- `background_writer` writes them while training continues.
- `best_epoch` decides which epoch is the best.
- `checkpoint_io` writes and reads checkpoints. `checkpoint_facts` records the run that a checkpoint is
  from, and checks that its weights fit a network.
- `exported_files` reads and writes the metadata of the files of `finetune export`.

Other files of a run:
- `metrics_csv`: metrics.csv and steps.csv.
- `results`: test.json or val.json, and skipped.txt. `headline` is the result in a sentence, which run.json keeps.
- `clock`: the time of each phase, in run.json.
- `facts` has the types of run.json, which are checked when it is read and written.
- `result_file` reads and writes test.json and val.json.

During a fit:
- `run_lock` admits one process at a time.
- `loggers` logs to TensorBoard, Weights & Biases and MLflow.

Reading a run:
- `record` reads all files, `predictions_table` the predictions for the test images. `headline` is the
  result in one sentence, and `intervals` has its interval.
- `licence` states the licence of the weights that training started from.

Another file of a run gets a module here, and so does another logger. Pages are in `reports`.
"""
