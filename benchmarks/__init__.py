"""Measurements of accuracy and speed, next to other tools. docs/benchmarks.md has their results."""
