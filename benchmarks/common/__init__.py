"""What every measurement shares: the loop of runs, records of JSON, blocks in documents, a sample of Fashion-MNIST."""
