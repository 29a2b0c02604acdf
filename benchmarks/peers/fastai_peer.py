"""fastai as its documentation has it: vision_learner and fine_tune.

    python fastai_peer.py --data FOLDER --weights FOLDER --out FOLDER [--epochs 5] [--seed 0]

`fine_tune` trains the head alone in the first of the epochs, its default. Prints the accuracy of the last epoch.
"""

import json

from arguments import parser
from fastai.vision.all import (
    ImageDataLoaders,
    RandomResizedCrop,
    accuracy,
    set_seed,
    vision_learner,
)


def main() -> None:
    args = parser(__doc__).parse_args()
    set_seed(args.seed)
    item = RandomResizedCrop(args.image_size, min_scale=0.35)
    dls = ImageDataLoaders.from_folder(
        args.data, valid="val", item_tfms=item, bs=args.batch_size, device="cpu"
    )
    learn = vision_learner(dls, f"local-dir:{args.weights}", metrics=accuracy, path=args.out)
    learn.fine_tune(args.epochs - 1)
    learn.export("model.pkl")
    print(json.dumps({"accuracy": float(learn.recorder.values[-1][-1])}))


if __name__ == "__main__":
    main()
