"""The data sets, each with its data module.

- `image_folder`: any folder of class folders or table, and the hotdog set.
- `image_source`: the interface of a source of images. `sources` has that of a folder, and chooses between it and that
  of a table, `table_source`. `folders` finds the classes, splits and images of a folder. `class_changes`:
  options that exclude or merge classes.
- `listing`: all images of a data set for `finetune check`, also of a faulty one.
- `fashion_mnist`: Fashion-MNIST by torchvision, written as PNGs.
- `download`: downloads archives.

A new data set is a module here and a public name in `finetune/__init__.py`. It is a subclass of
`image_folder.ImageFolderData` with its own `source_in`, or of `datamodule.ImageDataModule` with its own `scan`.
"""
