"""Code that all benchmarks share: the loop over runs, records in JSON, blocks in documents, a Fashion-MNIST sample."""
