"""Which option was probably meant: what other tools call it, another spelling, a short word."""

import difflib
import importlib
from collections.abc import Collection, Mapping

# What other tools call it, where the nearest spelling is something else or nothing: option -> what people say.
_SAID = {
    "trainer.max_epochs": "epochs epoch num_epochs n_epochs",
    "trainer.max_steps": "steps num_steps iterations",
    "trainer.devices": "gpus gpu num_gpus n_gpu device ngpus",
    "trainer.accelerator": "cpu cuda mps",
    "trainer.precision": "amp fp16 bf16 half",
    "trainer.default_root_dir": "out output_dir out_dir logdir log_dir save_dir run_dir name run_name project",
    "patience": "early_stopping",
    "trainer.callbacks": "callback",
    "output": "out o output_file",
    "top_k": "k top topk",
    "ckpt_path": "checkpoint ckpt weights_path",
    "seed_everything": "seed",
    "data.batch_size": "batch bs b",
    "data.image_size": "size img_size imgsz input_size resolution crop_size",
    "data.eval_image_size": "eval_size test_size val_size test_input_size",
    "data.image_size_schedule": "progressive_resizing size_schedule",
    "data.num_workers": "workers j",
    "data.root": "path folder dir data_dir data_path dataset",
    "data.class_names": "classes",
    "data.predict": "pictures picture images image files input source",
    "pictures": "predict picture images image files input source",
    "model.backbone": "arch architecture network model_name net",
    "model.weights": "pretrained",
    "model.optimizer": "opt optim",
    "model.optimizer.lr": "lr learning_rate rate lr0",
    "model.optimizer.weight_decay": "wd decay",
}

# Where the classes are that an option can name.
_CLASSES = {
    "model.optimizer": "torch.optim",
    "model.scheduler": "torch.optim.lr_scheduler",
    "trainer.callbacks": "pytorch_lightning.callbacks",
}
_BASES = {"Optimizer", "LRScheduler", "Callback"}  # which do nothing themselves


def nearest_key(key: str, valid: list[str]) -> str | None:
    """Return the valid dotted key that was probably meant by `key`: another word for it, or one spelt like it."""
    key = key.replace("-", "_")
    group, _, last = key.rpartition(".")
    if key in valid:
        return key
    said = [option for option, words in _SAID.items() if last in words.split()]
    # Within a class that a class_path names, keys are valid without their group.
    said = [key for option in said for key in (option, option.rpartition(".")[2]) if key in valid]
    if said:
        return max(said, key=lambda option: option.startswith(f"{group}."))
    matches = difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
    if matches:
        return matches[0]
    for candidates in ([name for name in valid if name.rpartition(".")[0] == group], valid):
        by_last_part = {name.rpartition(".")[2]: name for name in candidates}
        if matches := difflib.get_close_matches(last, list(by_last_part), n=1, cutoff=0.75):
            return by_last_part[matches[0]]
    meant = {
        word: option for option, words in _SAID.items() for word in words.split() if option in valid
    }
    long = [word for word in meant if len(word) > 4]  # shorter ones are like too much else
    near = difflib.get_close_matches(last, long, n=1, cutoff=0.7)
    return meant[near[0]] if near else None


def nearest_flag(key: str, words: Mapping[str, str], valid: Collection[str]) -> str | None:
    """Return the full name of the option that was probably meant by a flag: by a short word, too.

    Args:
        key: The flag as typed, without its dashes.
        words: The short words and the full names that they stand for.
        valid: The full names of all options.
    """
    key = key.replace("-", "_").lower()
    group, dot, last = key.rpartition(".")
    if last in words:
        return words[last]
    of_group = [word for word, full in words.items() if full.startswith(f"{group}{dot}")]
    if near := difflib.get_close_matches(last, of_group, n=1, cutoff=0.75):
        return words[near[0]]
    return nearest_key(key, sorted(valid))


def class_names(option: str) -> list[str]:
    """Return the names of the classes that an option can name without their module, none where that is not known."""
    if (home := _CLASSES.get(option)) is None:
        return []
    module = importlib.import_module(home)  # the parser has it already
    own = (
        key
        for key, value in vars(module).items()
        if str(getattr(value, "__module__", "")).startswith(home)
    )
    return sorted(key for key in own if key[0].isupper() and key not in _BASES)
