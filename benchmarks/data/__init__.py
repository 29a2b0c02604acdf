"""The road from files to batches: `loading` measures its rate, `indexing` how a million files begin."""
