"""Recipes compared on a part of the training images that is held out, so that a choice does not see the test images."""
