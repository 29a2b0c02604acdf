"""From a file to a batch on the device.

`datasets` know which pictures there are: `walk` finds files, `splits` sets some apart, `seen` keeps in mind which
were trained on. `readers` give picture i, by `decode` and `resize` within `limits`; `image_cache` keeps decoded ones
in a `memmap`, under their `identity`. `samplers` give the order and each device's share, `transforms` augment and
prepare, `dataset` joins them, `loader` reads in processes of its own and copies to the GPU. `datamodule` is the base
of all data modules, `data_settings` looks at what it is asked for, `depth` warns of pictures that would train as
black ones.
"""
