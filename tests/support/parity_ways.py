"""The ways that `finetune parity` shows on a machine with one kind of device."""

WAYS = [
    "one device",
    "by hand",
    "ddp",
    "ddp batch norm",
    "pipeline gpipe",
    "pipeline 1f1b",
    "layer-wise",
    "branches",
]
