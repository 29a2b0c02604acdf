"""A fit as functions of values: `decide` settles the settings once, `fit` builds, trains, tests and reports.

A `Plan` is what was decided. Written to a file, it is how processes of other devices, folds of a cross-validation and
fits of a Python program on several devices start: they decide nothing.
"""
