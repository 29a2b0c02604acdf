"""The data module of the drawn images."""

from pathlib import Path

from finetune.data.datasets.image_folder import ImageFolderData
from finetune.demo.drawing import write_sample


class SampleData(ImageFolderData):
    """Drawn food, made where root does not exist; root ends in source (8 dishes) or target (hotdog or not)."""

    default_root = "data/sample/target"

    def obtain(self, root: Path) -> Path:
        if not root.exists():
            if root.name not in ("source", "target"):
                raise ValueError(
                    f"--data.root {root}: the sample's folder is called source or target"
                )
            write_sample(root.parent, "source" if root.name == "source" else "target")
        return root
