"""Networks: building one, its parts, its weights.

`backbones` builds a network of torchvision's or one of three small ones, `stages` names its parts in order and its
head, and freezes, `heads` says how a new head starts; `ensemble` lets several networks answer together.
`image_classifier` is the whole module, from images to logits, that training, prediction and exports share;
`size_check` checks that it takes images of a size. `weight_files` reads files of pretrained weights, `weights` finds
them by name and puts them in, `misfits` says what to do with those that do not fit. `candidates` lists the networks
that `--backbone auto` chooses from, and finds out whether their weights can be had. `fx` follows the data flow: a
network split where it begins to learn, or with batch norm fused in. `safe_load` reads files of torch from anybody
without running what they hold; `checkpoint_sections` states key by key what a checkpoint of ours may hold,
`checkpoint_values` which values.

Networks from elsewhere get a module here, which `backbones`, `stages` and `weights` ask: `timm_backbones` builds
those of timm and knows what their weights say of themselves, `timm_weights` reads these.
"""
