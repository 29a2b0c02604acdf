"""Inference without a Trainer, and export.

Inference:
- `predictor` is a checkpoint, an ensemble or an .onnx file as a function from images to probabilities. `finetune
  predict` uses a Trainer instead (`training/prediction_files`), for many images on any number of devices. Programs use
  `api/loaded_model`, which is a predictor.
- `onnx_network` runs an exported file in the place of the network.
- `class_activation` computes class activation maps. `image_viewer` draws them over images.
- `tta` is test-time augmentation.
- `joined_checkpoint` makes one checkpoint of those of several runs, and moves a calibration into a head.

Export:
- `end_to_end` is the exported module, from pixels to probabilities.
- `exporters` writes it to files. `export_check` verifies a file against the checkpoint.
- `timm_folder` writes a network as a folder that timm and the Hugging Face hub can read.
- `quantize` writes an int8 file.
- `export_about` describes a file in JSON.

Another format is a row in `exporters.WRITERS`, and a way to read it in `export_check.load_exported`.
"""
