"""A sample of Fashion-MNIST as a folder of pictures, for what reads nothing else."""

from pathlib import Path


def write_fashion_folder(source: str | Path, root: Path, train: int = 200, test: int = 100) -> Path:
    """Write the first pictures of each class of Fashion-MNIST as an image folder: 2,000 to train, 1,000 to test."""
    from PIL import Image
    from torchvision.datasets import FashionMNIST

    for split, num in (("train", train), ("test", test)):
        # unpacks what is there
        pictures = FashionMNIST(source, train=split == "train", download=True)
        for k, name in enumerate(pictures.classes):
            folder = root / split / name.replace("/", " or ")
            folder.mkdir(parents=True)
            for i in (pictures.targets == k).nonzero().flatten()[:num].tolist():
                Image.fromarray(pictures.data[i].numpy()).save(folder / f"{i:05d}.png")
    return root
