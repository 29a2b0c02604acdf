"""The data sets, each with its data module.

`image_folder` is any folder of class folders, which `folders` finds in it, and the hotdog set. `misplaced` says which
folder was probably meant. `listing` finds the same and whatever is wrong there. `fashion_mnist` is that set, whose
files `fashion_mnist_files` reads. `download` fetches archives.

A new source is a module here: a subclass of `datamodule.ImageDataModule` that says which pictures there are and how
picture i is read, and a public name in `finetune/__init__.py`.
"""
