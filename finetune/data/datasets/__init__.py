"""The data sets, each with its data module.

- `image_folder`: any folder of class folders or table, and the hotdog set.
- `scan` finds the images of a place: `folders` those of class folders, the package `tables` those of a table.
- `fashion_mnist`: Fashion-MNIST by torchvision, written as PNGs.
- `download`: downloads archives.

A new data set is a module here and a public name in `finetune/__init__.py`. It is a subclass of
`image_folder.ImageFolderData` with its own `place_in`, or of `datamodule.ImageDataModule` with its own `scan`.
"""
