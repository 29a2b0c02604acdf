"""The book's fine-tuning in plain PyTorch, after d2l.ai's section "Fine-Tuning": the reference of our configs.

Nothing of `finetune` is imported: torchvision reads and transforms the images, the loop is written out.

    python benchmarks/recipes/plain.py --root HOTDOG --weights resnet18.pt --recipe book --image_size 128 --seed 0

Recipes: `book` (plain SGD, summed loss, head 10 times the rate, 128 images a step), `scratch` (the same from random
weights at 10 times the rate for all), `one_rate` (SGD with momentum 0.9, one cycle to 0.02, 64 images a step). Five
epochs on all training images; the test split is measured after the last. Prints one line of JSON.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

_NORMALIZE = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_EPOCHS = 5


def loaders(root: str, image_size: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return batches of train, shuffled and augmented, and of test."""
    side = image_size * 256 // 224
    train = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]
    test = [transforms.Resize([side, side]), transforms.CenterCrop(image_size)]
    to_tensor = [transforms.ToTensor(), _NORMALIZE]
    train_set = ImageFolder(f"{root}/train", transforms.Compose(train + to_tensor))
    test_set = ImageFolder(f"{root}/test", transforms.Compose(test + to_tensor))
    return DataLoader(train_set, batch_size, shuffle=True, num_workers=1), DataLoader(
        test_set, 64, num_workers=1
    )


def network(weights: str | None, num_classes: int) -> nn.Module:
    """Return ResNet-18 with a new Xavier head, pretrained where `weights` names a state dict."""
    net = resnet18()
    if weights is not None:
        state = torch.load(weights, weights_only=True)
        net.load_state_dict(
            {name: t for name, t in state.items() if not name.startswith("fc.")}, strict=False
        )
    net.fc = nn.Linear(net.fc.in_features, num_classes)
    nn.init.xavier_uniform_(net.fc.weight)
    return net.to(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="folder with train/CLASS and test/CLASS")
    parser.add_argument("--weights", help="state dict of torchvision's ResNet-18")
    parser.add_argument("--recipe", choices=["book", "scratch", "one_rate"], default="book")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    batch_size = 64 if args.recipe == "one_rate" else 128
    train, test = loaders(args.root, args.image_size, batch_size)
    net = network(None if args.recipe == "scratch" else args.weights, len(train.dataset.classes))

    schedule = None
    if args.recipe == "book":
        body = [p for name, p in net.named_parameters() if not name.startswith("fc.")]
        head = {"params": net.fc.parameters(), "lr": 5e-4}
        optimizer = torch.optim.SGD([{"params": body}, head], lr=5e-5, weight_decay=1e-3)
    elif args.recipe == "scratch":
        optimizer = torch.optim.SGD(net.parameters(), lr=5e-4, weight_decay=1e-3)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, total_steps=_EPOCHS * len(train)
        )
    reduction = "mean" if args.recipe == "one_rate" else "sum"

    for _ in range(_EPOCHS):
        net.train()
        for x, y in train:
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(x.to(memory_format=torch.channels_last))
            optimizer.zero_grad()
            F.cross_entropy(logits.float(), y, reduction=reduction).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()

    net.eval()
    right: list[bool] = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for x, y in test:
            right += (net(x.to(memory_format=torch.channels_last)).argmax(1) == y).tolist()
    result = {
        "accuracy": sum(right) / len(right),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps({**result, "right": [int(r) for r in right]}))  # in the order of the paths


if __name__ == "__main__":
    main()
