"""Networks: how they are built, their parts and their weights.

Networks:

- `backbones`: builds a network of a library. `library` is what the libraries have in common, `torchvision_networks`
  and `timm_networks` are the two that there are, `network_names` the names that are known without torch.
- `stages`: the stages of a network in order, its head, and freezing.
- `multi_stage`: networks whose head takes the features of several stages.
- `ensemble`: several networks whose probabilities are averaged.
- `image_classifier`: the complete module from images to logits. Training, prediction and exports share it.

Weights and checkpoints:

- `weights`: finds pretrained weights by name or file, reads them, and loads them into a network.
- `weight_files`: reads untrusted files of weights and checkpoints without running code from them.
- `hub`: downloads weights that the user names on the Hugging Face hub.
- `checkpoint`: the keys of a checkpoint, with a rule for each value.
"""
