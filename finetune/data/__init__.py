"""From a file to a batch on the device.

First which images there are: a split is a table of `samples` with their `targets`. The package `datasets` makes these
tables, for which `walk` finds files and `splits` sets some apart; `storage` knows files without reading
them, and opens them; `prediction_paths` are those to predict;
`seen_record` records which were trained on, by name and by their `contents`, and `seen` leaves these out of a test.
Then one image: `samples` read image i, by `decode` and `resize` within `limits`; `completeness` refuses short
files, `bit_depths` become bytes. `image_cache` keeps decoded ones in a `memmap`;
`transforms` augment it and bring it to size, which `size_schedule` may change by epoch, one of them is
`trivial_augment`, and by `mixing` two become one. Then batches: `samplers` give the order and each device's share,
`batch_limits` counts them, `dataset` joins all this, `loader` reads in processes of its own, which `worker_start`
starts, `train_loader` the next epoch's first ones ahead, `device_copy` copies to the GPU. `datamodule` is the base of
all data modules, `data_settings` looks at what it is asked for, `depth` warns of pictures that would train as black
ones.

What may be wrong with them is looked for by the package `checking`.

What makes, changes or mixes pictures goes here, as a function of (seed, epoch, index): the result must not depend on
the devices.
"""
