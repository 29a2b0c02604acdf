"""Hugging Face's Trainer as its documentation and its image classification example have it, on a network of timm.

    python transformers_peer.py --data FOLDER --weights FOLDER --out FOLDER [--epochs 5] [--seed 0] [--workers 2]

Prints the accuracy of the last epoch.
"""

import json

from arguments import parser
from datasets import load_dataset
from torchvision import transforms
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--workers", type=int, default=0, help="processes that read images")
    args = arguments.parse_args()
    set_seed(args.seed)  # the new head is drawn before the Trainer does so

    data = load_dataset("imagefolder", data_dir=args.data)
    names = data["train"].features["label"].names
    stats = AutoImageProcessor.from_pretrained(args.weights).data_config
    to_tensor = [transforms.ToTensor(), transforms.Normalize(stats["mean"], stats["std"])]
    fixed = transforms.Compose(
        [transforms.Resize(args.image_size), transforms.CenterCrop(args.image_size), *to_tensor]
    )
    random = transforms.Compose(
        [
            transforms.RandomResizedCrop(args.image_size),
            transforms.RandomHorizontalFlip(),
            *to_tensor,
        ]
    )

    def transform(how):
        def apply(batch):
            return {
                "pixel_values": [how(x.convert("RGB")) for x in batch["image"]],
                "labels": batch["label"],
            }

        return apply

    net = AutoModelForImageClassification.from_pretrained(
        args.weights,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
        ignore_mismatched_sizes=True,
    )
    options = TrainingArguments(
        args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        eval_strategy="epoch",
        save_strategy="epoch",
        remove_unused_columns=False,
        report_to="none",
        use_cpu=True,
        seed=args.seed,
        dataloader_num_workers=args.workers,
    )
    trainer = Trainer(
        net,
        options,
        train_dataset=data["train"].with_transform(transform(random)),
        eval_dataset=data["validation"].with_transform(transform(fixed)),
        compute_metrics=lambda p: {
            "accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())
        },
    )
    trainer.train()
    trainer.save_model()
    results = [
        line["eval_accuracy"] for line in trainer.state.log_history if "eval_accuracy" in line
    ]
    print("\n" + json.dumps({"accuracy": results[-1]}))


if __name__ == "__main__":
    main()
