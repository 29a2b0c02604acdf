"""What a run leaves on disk, file by file, and how it goes on from there.

A run is a `folder` with its config.yaml; `run_checkpoint` takes it for its best checkpoint. In it `metrics_csv`
writes metrics.csv and steps.csv; `model_checkpoint` says when last.ckpt and best.ckpt are written, and that a step
which diverged is not, `deferred_checkpoints` which wait for a while, `best_epoch` which is the best, `checkpoint_io`
how they are written, and reads them, `checkpoint_facts` which run they are from and which network they fit,
`exported_files` what `finetune export` made of them; `results` writes test.json or val.json, and skipped.txt,
`predictions` predictions.csv and test_predictions.csv (`parquet` another kind of file), `clock` seconds.json.
`newest_run` finds the run to go on in, `resume` goes on in it, one process at a time (`run_lock`), and tells what has
changed since (`changes`); `side_files` sets damaged files aside that this does not need; `worse_than_start` warns of
training that harms, `interpolation_record` is what a fit says of the weights that it kept; `lightning_callbacks` sees
to it that Lightning's own, such as early stopping, go on too.

What logs elsewhere besides, if it is asked to, is a `run_logger`: `tensorboard_logger`, `wandb_logger`,
`mlflow_logger`.

`run_search` finds the folders of runs, `run_table` makes a row of each from its small files, `removal` deletes a run
or what only resuming needs (`checkpoint_parts`).

Then what reads a run's folder and nothing else: `record` reads all of it, `answers` what was said of the test
pictures, `data_check` what `finetune check` said of its data. `html_report` writes report.html (`headline` its head),
`live_report` while the run goes on, of `charts`, `highlights` (which images to look at), a `model_card` and
`statistics`; `comparison` puts several runs on one page, `inline_report` one into a notebook. `licence` says whose
terms hold for the weights that a run began with.

Another file that a run writes gets a module here, and so does another page that is made of a run's folder, and a
logger.
"""
