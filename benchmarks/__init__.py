"""Measurements: each folder is run as `python -m benchmarks.FOLDER`; its records lie beside its code."""
