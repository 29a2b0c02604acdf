"""The reference job: torchvision's loader and a plain loop, in bf16 and channels_last.

    python -m benchmarks.speed.gpu_plain --root FOLDER --batch_size 256 --num_workers 8

Nothing of `finetune` is imported. Workers stay and memory is pinned, as in ours. Prints a line for each epoch, as
`finetune fit` does.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="folder with train/CLASS/*")
    parser.add_argument("--weights", help="state dict of torchvision's ResNet-18")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--num_workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(args.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = ImageFolder(f"{args.root}/train", transform)
    is_cuda = args.device == "cuda"
    loader = DataLoader(
        dataset,
        args.batch_size,
        True,
        num_workers=args.num_workers,
        pin_memory=is_cuda,
        persistent_workers=True,
    )
    net = resnet18()
    if args.weights:
        net.load_state_dict(torch.load(args.weights, weights_only=True), strict=False)
    net.fc = nn.Linear(net.fc.in_features, len(dataset.classes))
    net = net.to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        for images, labels in loader:
            x = images.to(args.device, non_blocking=True).contiguous(
                memory_format=torch.channels_last
            )
            y = labels.to(args.device, non_blocking=True)
            with torch.autocast(args.device, torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if is_cuda:
            torch.cuda.synchronize()
        rate = len(dataset) / (time.perf_counter() - began)
        print(f"epoch {epoch + 1}/{args.epochs}  {rate:.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
