"""Inference without a Trainer, and export.

Inference:
- `predictor` is a checkpoint as a function from images to probabilities. `finetune predict` uses a
  Trainer instead (`runs/predictions`), for many images on any number of devices. Programs use
  `api/loaded_model`.
- `class_activation` computes class activation maps. `image_viewer` draws them over images.
- `tta` is test-time augmentation.
- `joined_checkpoint` makes one checkpoint of those of several runs.

Export:
- `end_to_end` is the exported module, from pixels to probabilities. `calibrated_head` moves the calibration into the
  head, for files without it.
- `exporters` writes it to files. `export_check` verifies a file against the checkpoint.
- `timm_folder` writes a network as a folder that timm and the Hugging Face hub can read.
- `quantize` writes an int8 file.
- `export_about` describes a file in JSON.
- `exported_network` runs an exported file in the place of the network, with `onnx_session`.

Another format is a row in `exporters.WRITERS`, and a way to read it in `export_check.load_exported`.
"""
