"""The root of the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
