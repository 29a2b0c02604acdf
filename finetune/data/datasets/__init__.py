"""The data sets, each with its data module.

`image_folder` is any folder of class folders, which `folders` finds in it; the hotdog set; and the sample, which
`synthetic` draws. `fashion_mnist` is that set, whose files `fashion_mnist_files` reads. `download` fetches archives.
"""
