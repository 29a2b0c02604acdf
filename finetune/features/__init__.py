"""What a frozen part of a network makes of pictures, computed once.

`feature_cache` computes it on all devices, keeps it on disk and hands it to the data, so that only the rest trains.
`linear_probe` takes what the head sees of each picture and fits a head on it, by `logistic_regression`.
Outside of training `picture_features` computes them of files, and `label_errors` ranks doubtful labels by them.

What learns from features, or looks for something in them (doubtful labels, neighbours), goes here.
"""
