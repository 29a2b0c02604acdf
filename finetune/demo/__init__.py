"""The command `finetune demo`: fine-tuning on images that are drawn by code, offline.

- `drawing`: draws the images.
- `sample_data`: their data module, `finetune.SampleData`.
- `demo`: the command.

No other package depends on this one.
"""
