"""Code that all benchmarks share: the loop over runs, the records, and the tables of docs/benchmarks.md."""
