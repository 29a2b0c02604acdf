"""A sample of Fashion-MNIST as an image folder, for tools that read no other layout."""

from pathlib import Path


def write_fashion_folder(source: str | Path, root: Path, train: int = 200, test: int = 100) -> Path:
    """Write the first images of each class of Fashion-MNIST as an image folder.

    Args:
        source: Folder of torchvision's data set.
        root: Folder to create.
        train: Training images of each class.
        test: Test images of each class.

    Returns:
        `root`.
    """
    from PIL import Image
    from torchvision.datasets import FashionMNIST

    for split, num in (("train", train), ("test", test)):
        # `download` unpacks files that exist
        images = FashionMNIST(source, train=split == "train", download=True)
        for k, name in enumerate(images.classes):
            folder = root / split / name.replace("/", " or ")
            folder.mkdir(parents=True)
            for i in (images.targets == k).nonzero().flatten()[:num].tolist():
                Image.fromarray(images.data[i].numpy()).save(folder / f"{i:05d}.png")
    return root
