"""What a run leaves on disk, file by file, and how it goes on from there.

A run is a `folder` with its config.yaml. In it `metrics_csv` writes metrics.csv; `model_checkpoint` says when
last.ckpt and best.ckpt are written, `checkpoint_io` how; `results` writes test.json or val.json, and skipped.txt,
`predictions` predictions.csv. `resume` goes on in a run, one process at a time (`run_lock`), and tells what has
changed since (`changes`); `lightning_callbacks` sees to it that Lightning's own, such as early stopping, go on too.

Another file that a run writes gets a module here, and so does what reads a run's folder and nothing else, such as a
report.
"""
