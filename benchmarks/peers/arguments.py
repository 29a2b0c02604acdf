"""The command line that the scripts of the peers without one have in common."""

import argparse


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all tools have: images, output and training."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--data", required=True, help="folder with train/CLASS and val/CLASS")
    made.add_argument("--out", required=True)
    made.add_argument("--epochs", type=int, default=5)
    made.add_argument("--batch_size", type=int, default=64)
    made.add_argument("--image_size", type=int, default=128)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--weights", required=True, help="folder of a network of timm")
    return made
