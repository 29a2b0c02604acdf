"""Plain PyTorch in the manner of torchvision's references: ImageFolder, its transforms, the loop written out.

    python plain_peer.py --data FOLDER --out FOLDER [--epochs 5] [--seed 0] [--weights FOLDER]

Without `--weights` it trains torchvision's ResNet-18. SGD with one cycle to 0.02, in float32. Prints the accuracy of
the last epoch.
"""

import json
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from arguments import parser
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18


def network(weights: str | None, num_classes: int) -> nn.Module:
    """Return the pretrained network with a new head."""
    if weights is not None:
        return timm.create_model(f"local-dir:{weights}", pretrained=True, num_classes=num_classes)
    net = resnet18(weights="DEFAULT")
    net.fc = nn.Linear(net.fc.in_features, num_classes)
    return net


def normalize(net: nn.Module) -> transforms.Normalize:
    """Return the normalization that the pretrained weights need."""
    cfg = getattr(
        net, "pretrained_cfg", {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    )
    return transforms.Normalize(cfg["mean"], cfg["std"])


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.manual_seed(args.seed)
    num_classes = sum(1 for _ in Path(args.data, "train").iterdir())
    net = network(args.weights, num_classes)
    side = args.image_size * 256 // 224
    to_tensor = [transforms.ToTensor(), normalize(net)]
    fixed = [transforms.Resize(side), transforms.CenterCrop(args.image_size), *to_tensor]
    random = [
        transforms.RandomResizedCrop(args.image_size),
        transforms.RandomHorizontalFlip(),
        *to_tensor,
    ]
    train_set = ImageFolder(f"{args.data}/train", transforms.Compose(random))
    val_set = ImageFolder(f"{args.data}/val", transforms.Compose(fixed))
    # the references' 16 are too many for two cores
    train = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=2)
    val = DataLoader(val_set, args.batch_size, num_workers=2)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=args.epochs * len(train)
    )

    for _ in range(args.epochs):
        net.train()
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
        net.eval()
        num_correct = 0
        with torch.inference_mode():
            for x, y in val:
                num_correct += int((net(x).argmax(1) == y).sum())
        torch.save(net.state_dict(), f"{args.out}/model.pt")
    print(json.dumps({"accuracy": num_correct / len(val_set)}))


if __name__ == "__main__":
    main()
