"""From a file to a batch on the device.

Lists of images:

- `samples`: the images of one split as a table, with their `targets`. `data_set`: the classes and splits of a place,
  with its `faults`.
- `datasets`: the package that finds the images of a place, in folders or by the package `tables`, each as a `listing`.
  `walk` finds image files.
- From a data set to a data set: `drawn_splits` draws splits by the hashes of `splits`, also of groups of images that
  share one, and `corrections` applies the labels of a corrections.csv.
- `local_folders`: the folder of any place: `archives` are unpacked, and datasets of the hub downloaded, once. A folder
  of a bucket, such as s3://bucket/x, stays an address: its `mirror` has the list, and a copy of each file that was
  read from the `bucket`. `image_files` lists folders, stats files and opens them, wherever they are.
- `prediction_paths`: the images to predict.
- `seen`: the record of the training images, by the digests of `file_facts`, which excludes them from evaluation.

One image:

- `decode`: a file to RGB pixels, complete or refused, with `resize` and `limits`. `heif`: HEIC and AVIF.
- `image_cache`: decoded images on disk, in a `memmap`.
- `transforms`: augmentation and resizing, with `mixing`.

Batches:

- `samplers`: the order of the images, and the batches of each rank. `batch_limits`: the Trainer's limits on them.
  `dataset`: one index to one sample.
- `loader`: worker processes, which prefetch the next epoch, and the copy of batches to the GPU.

`datamodule` is the base class of all data modules. `data_settings` reads some of its settings.
`class_weights` parses the weights of classes, `data_place` says where the images lie. The package
`checking` looks for faults in a data set.

Code that creates, changes or mixes images belongs here. Its result must be a function of (seed, epoch, index), never of
the devices.
"""
