"""`finetune` next to plain PyTorch, timm, fastai, Ultralytics and transformers, on the same images."""
