"""What a network makes of pictures before its head, computed once.

`linear_probe` takes what the head sees of each picture and fits a head on it, by `logistic_regression`: all that
`--freeze backbone` does, and the start of `head_init: probe`.
Outside of training `picture_features` computes them of files, `label_errors` ranks doubtful labels by them, and
`backbone_ranking` networks.

What learns from features, or looks for something in them (doubtful labels, neighbours), goes here.
"""
