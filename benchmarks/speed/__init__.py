"""Images a second: loading, one GPU, serving, exported files. `python -m benchmarks.speed NAME --help`."""
