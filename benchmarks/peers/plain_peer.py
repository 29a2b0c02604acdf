"""Plain PyTorch in the manner of torchvision's references: ImageFolder, its transforms, the loop written out.

    python plain_peer.py --data FOLDER --weights FOLDER --out FOLDER [--epochs 5] [--seed 0]

SGD with one cycle to 0.02, in float32. Prints the accuracy of the last epoch.
"""

import json
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from arguments import parser
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.manual_seed(args.seed)
    num_classes = sum(1 for _ in Path(args.data, "train").iterdir())
    net = timm.create_model(f"local-dir:{args.weights}", pretrained=True, num_classes=num_classes)
    side = args.image_size * 256 // 224
    stats = net.pretrained_cfg
    to_tensor = [transforms.ToTensor(), transforms.Normalize(stats["mean"], stats["std"])]
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
