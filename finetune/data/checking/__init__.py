"""Checks of a data set before training, without a trained network.

- `image_facts`: decodes each image once and collects its properties.
- `checks`: faults of files, classes and names, by these properties.
- `duplicates`: copies of images, by `perceptual_hash`; equal files have equal digests in `data.file_facts`.
- `shortcuts`: properties of files that give away a class or a split.
- `series`: bursts and video frames, which splits must not tear apart.
- `findings`: the results of all checks. `reports.check_page` writes them.
- `first_look`: the checks that every fit does.

A new check of images belongs here. A check that needs a network's features belongs in `features/`.
"""
