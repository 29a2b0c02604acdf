"""Features: the input of a network's head, computed once per image.

- `linear_probe`: fits a head on the features by `logistic_regression`, for `--freeze backbone` and `head_init: probe`.
- `image_features`: computes the features of image files, outside of training.
- `average_precision`: how well scores order the images with a label before the others.
- `label_errors`: ranks images by how doubtful their labels are.
- `backbone_ranking`: ranks networks by their features.

Code that fits on features, or searches in them (label errors), belongs here.
"""
