"""Networks: how they are built, their parts and their weights.

Networks:

- `backbones`: builds a network of torchvision or timm, or one of three small ones.
- `stages`: the stages of a network in order, its head, and freezing.
- `multi_stage`: networks whose head takes the features of several stages.
- `ensemble`: several networks whose probabilities are averaged.
- `image_classifier`: the complete module from images to logits. Training, prediction and exports share it.
- `size_check`: checks that a network takes images of a size.
- `fx`: fuses batch norm into convolutions.
- `network_list`: all networks of torchvision and timm, for `finetune backbones`.
- `candidates`: the networks that `--backbone auto` chooses from, and whether their weights are available.

Weights and checkpoints:

- `weight_files`: reads files of pretrained weights.
- `weights`: finds pretrained weights by name or file, and loads them into a network.
- `hub`: downloads weights that the user names on the Hugging Face hub.
- `safe_load`: reads untrusted files of torch without running code from them.
- `checkpoint_sections`: the keys of a checkpoint, with a rule for each value.
- `checkpoint_values`: these rules.

A further library of networks gets modules of its own, which `backbones`, `stages` and `weights` call. For timm,
`timm_backbones` builds networks and reads the description of their weights, and `timm_weights` reads the weights.
"""
