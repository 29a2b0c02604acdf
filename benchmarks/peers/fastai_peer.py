"""fastai as its documentation has it: vision_learner and fine_tune, or load_learner and get_preds.

    python fastai_peer.py --data FOLDER --out FOLDER [--epochs 5] [--seed 0] [--best] [--weights FOLDER]
    python fastai_peer.py --predict FOLDER --out FOLDER

`fine_tune` trains the head alone in the first of the epochs, its default. `--best` is channels last and workers that
stay; its bf16 is for CUDA only (fastai/callback/fp16.py). Prints the accuracy of the last epoch.
"""

import argparse
import json
from pathlib import Path

import sitecustomize  # the clock: fastai's optimizers aren't torch's
from arguments import parser
from fastai.vision.all import (
    Callback,
    ImageDataLoaders,
    RandomResizedCrop,
    accuracy,
    get_image_files,
    load_learner,
    resnet18,
    set_seed,
    vision_learner,
)


class Ticks(Callback):
    def after_step(self):
        sitecustomize.tick()


def train(args: argparse.Namespace) -> None:
    if args.seed is not None:
        set_seed(args.seed)
    item = RandomResizedCrop(args.image_size, min_scale=0.35)
    options = {"persistent_workers": True} if args.best else {}
    dls = ImageDataLoaders.from_folder(
        args.data, valid="val", item_tfms=item, bs=args.batch_size, device="cpu", **options
    )
    network = resnet18 if args.weights is None else f"local-dir:{args.weights}"
    learn = vision_learner(dls, network, metrics=accuracy, path=args.out)
    if args.best:
        learn.to_channelslast(use_amp=False)
    if args.epochs == 1:
        learn.fit_one_cycle(1, cbs=Ticks())
    else:
        learn.fine_tune(args.epochs - 1, cbs=Ticks())
    result = float(learn.recorder.values[-1][-1])
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, Ticks)])
    learn.export("model.pkl")
    print(json.dumps({"accuracy": result}))


def predict(args: argparse.Namespace) -> None:
    learn = load_learner(Path(args.out, "model.pkl"))
    files = get_image_files(args.predict)
    probabilities, _ = learn.get_preds(dl=learn.dls.test_dl(files))
    lines = [
        f"{file},{','.join(map(str, row))}"
        for file, row in zip(files, probabilities.tolist(), strict=True)
    ]
    Path(args.out, "predictions.csv").write_text("\n".join(lines), "utf-8")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--predict", help="folder of images")
    args = arguments.parse_args()
    predict(args) if args.predict else train(args)


if __name__ == "__main__":
    main()
