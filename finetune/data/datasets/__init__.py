"""The data sets, each with its data module.

- `image_folder`: any folder of class folders, and the hotdog set. `folders` finds its classes, splits and images.
- `misplaced`: hints for a folder that is one level too high or too low.
- `listing`: all images of a data set for `finetune check`, also of a faulty one.
- `fashion_mnist`: Fashion-MNIST. `fashion_mnist_files` reads its files and writes them as PNGs.
- `download`: downloads archives.

A new data set is a module here and a public name in `finetune/__init__.py`. It is a subclass of
`image_folder.ImageFolderData` that returns the folder of the images, or of `datamodule.ImageDataModule` that sets the
splits.
"""
