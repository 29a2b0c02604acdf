"""The rate of loading images."""
