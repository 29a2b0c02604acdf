"""The data module of Fashion-MNIST."""

from pathlib import Path

from finetune.data.addresses import check_is_local
from finetune.data.datasets.fashion_mnist_files import CLASS_NAMES, is_available, write_images
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.datasets.image_source import ImageSource
from finetune.system.messages import WrongUsage


class FashionMNIST(ImageFolderData):
    """Fashion-MNIST by torchvision: grey 28x28 images of clothes, which are written once as PNGs in class folders."""

    default_root = "data/fashion-mnist"
    reads_tables = False
    default_class_names = CLASS_NAMES

    def source_in(self, folder: str) -> ImageSource:
        check_is_local(folder)
        if self.merge:
            raise WrongUsage(
                "--data.merge merges class folders, and Fashion-MNIST has none: drop the option"
            )
        if self.exclude:
            raise WrongUsage(
                "--data.exclude skips class folders, and Fashion-MNIST has none: drop the option"
            )
        return super().source_in(str(write_images(Path(folder))))

    @classmethod
    def is_in(cls, root: str) -> bool:
        return is_available(Path(root))
