"""The data sets, each with its data module.

`image_folder` is any folder of class folders, which `folders` finds in it, and the hotdog set. `misplaced` says which
folder was probably meant. `listing` finds the same and whatever is wrong there. `fashion_mnist` is that set, whose
files `fashion_mnist_files` reads, and writes as PNGs. `download` fetches archives.

A new source is a module here and a public name in `finetune/__init__.py`: a subclass of `image_folder.ImageFolderData`
that says in which folder the images are, or of `datamodule.ImageDataModule` that says which images there are.
"""
