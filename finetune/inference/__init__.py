"""From a checkpoint to answers, without a Trainer.

`predictor` is a checkpoint as a function: pictures in, probabilities out. (`finetune predict` answers for very many
pictures on any number of devices, by a Trainer: `runs/predictions`; `api/loaded_model` is for programs.) `lens` looks
at pictures as `predictor` does, and shows where in them its network saw a class, by `class_activation`.

`end_to_end` is the network as it leaves the tool, pixels in and probabilities out, of which `exporters` make files that
`export_check` holds against the predictor, `quantize` one in int8, and `any_size` one that prepares pictures itself;
`export_about` says what is to be known of a file. `onnx_network` puts such a file in the network's place again.

`tta` averages over views of a picture. Another format goes into `exporters`; what corrects probabilities, here, too.
"""
