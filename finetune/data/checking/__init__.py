"""Checks of a data set before training, without a trained network.

- `image_facts`: decodes each image once and collects its properties.
- `checks`: faults of files, classes and names, by these properties, and the checks that every fit does.
- `copies`: equal files, and images of one photograph.
- `shortcuts`: properties of files that give away a class or a split.
- `series`: bursts and video frames, which splits must not tear apart.
- `findings`: the results of all checks. `reports.check_page` writes them.

A new check of images belongs here. A check that needs a network's features belongs in `features/`.
"""
