"""Fine-tuning for several labels an image in plain PyTorch and timm: what `finetune fit` is compared with.

Nothing of `finetune` is imported. Binary cross entropy, AdamW at one rate, flipped images, no schedule; the weights
after the last epoch, and a threshold of 1/2.

    python benchmarks/labels/plain.py labels.csv --network tf_efficientnet_lite0 --weights model.safetensors --epochs 15

Prints the probabilities of the test images as one line of JSON, in the order of the table.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

_BATCH_SIZE = 32


def read_split(table: Path, split: str, size: int) -> tuple[Tensor, list[set[str]]]:
    """Return the images of a split (N, 3, size, size) in [-1, 1], and the labels of each."""
    images = []
    labels = []
    with open(table, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["split"] == split:
                with Image.open(table.parent / row["path"]) as image:
                    resized = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
                images.append(torch.from_numpy(np.array(resized)).permute(2, 0, 1))
                labels.append(set(row["labels"].split(";")))
    return torch.stack(images) / 127.5 - 1, labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("--network", required=True, help="a name of timm")
    parser.add_argument("--weights", required=True, help="its state dict")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    images, labels = read_split(args.table, "train", args.size)
    names = sorted(set().union(*labels))
    targets = torch.tensor([[float(name in own) for name in names] for own in labels])

    net = timm.create_model(args.network, num_classes=len(names))
    state = load_file(args.weights)
    backbone = {name: t for name, t in state.items() if not name.startswith("classifier.")}
    net.load_state_dict(backbone, strict=False)
    net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)

    for _ in range(args.epochs):
        net.train()
        for chosen in torch.randperm(len(images)).split(_BATCH_SIZE):
            x = images[chosen]
            is_flipped = torch.rand(len(x), 1, 1, 1) < 0.5
            x = torch.where(is_flipped, x.flip(3), x).contiguous(memory_format=torch.channels_last)
            loss = F.binary_cross_entropy_with_logits(net(x), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    net.eval()
    tested, _ = read_split(args.table, "test", args.size)
    with torch.inference_mode():
        probabilities = torch.cat([net(x).sigmoid() for x in tested.split(_BATCH_SIZE)])
    print(json.dumps(probabilities.tolist()))


if __name__ == "__main__":
    main()
