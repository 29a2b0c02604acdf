"""`finetune` and other tools, each with its own recipe, on the same images and from the same weights."""
