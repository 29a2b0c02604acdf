"""The data module of the drawn images."""

from pathlib import Path
from typing import get_args

from finetune.data.addresses import check_is_local
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.demo.drawing import TABLE, Task, write_sample


class SampleData(ImageFolderData):
    """Drawn food, made where root does not exist; root ends in source (8 dishes), target (hotdog or not) or several."""

    default_root = "data/sample/target"

    def place_in(self, folder: str) -> str:
        check_is_local(folder)
        place = Path(folder)
        if not place.exists():
            task = next((task for task in get_args(Task) if task == place.name), None)
            if task is None:
                raise ValueError(
                    f"--data.root {folder}: the folder of the sample is called source, target or several"
                )
            write_sample(place.parent, task)
        table = place / TABLE
        return str(table) if table.is_file() else folder
