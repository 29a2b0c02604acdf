"""Measurements: `python -m benchmarks.FOLDER`, or `benchmarks.FOLDER.SCRIPT`; the records lie next to the code."""
