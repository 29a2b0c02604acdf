"""The promises, in the order of docs/promises.md: the name of each, for `pytest --promise`, and its text."""

GROUPS = {
    "The same training on any number of devices": {
        "any-number-of-devices": "Any number of devices trains the same weights, to rounding",
        "random-numbers": "Order, augmentation, mixing and dropout are functions of seed, epoch or step, and image",
        "batch-norm": "Batch norm takes its statistics from all images of the batch on all devices",
        "each-image-once": "Each image counts once; predictions are in the order of the input",
        "exact-metrics": "Metrics, temperature and thresholds are those of the images of all devices",
        "equal-ranks": "Ranks that found different images or labels do not start",
    },
    "An honest result": {
        "interval": "The interval of an mAP contains the true value, also if labels occur together",
        "group-answers": "A group of images has one prediction: the mean of their log probabilities (multi-label: "
        "the largest probability)",
        "groups": "Images of a group share a split, and each image is tested in one fold",
        "folds": "A cross-validation measures all images, and none with a threshold that was chosen on it",
        "unseen": "A test measures no image that was trained on, and no copy of one",
        "best-weights": "A fit keeps the weights before training if each epoch is more than a standard error worse",
        "familiarity": "`--none_below P` predicts `none` for at most the share P of new images of the classes, on "
        "average",
        "solved-head": "The head of a frozen network is the optimum of a logistic regression on its features",
        "frozen": "Frozen layers do not change, batch norm included",
    },
    "Interrupted runs": {
        "resume": "A run that was interrupted and resumed equals one that was not",
        "stop": "Ctrl-C and SIGTERM save and end every process",
        "lost-rank": "If a rank hangs, the run ends within about 10 minutes with a complete checkpoint",
        "complete-files": "A checkpoint on disk is complete or absent",
        "kills": "A command that was killed or could not write has the usual result when it is started again",
        "keep-last": "`--keep_last false` leaves a run that predicts as before and is not resumed",
        "run-name": "`--name` names a new run and, with `--resume`, the run to continue",
    },
    "The same predictions from every program": {
        "preparation": "Images are prepared for prediction as for training",
        "pad": "`--data.resize pad` shows the network the complete image in all programs",
        "export": "An exported file predicts as the checkpoint",
        "multi-label": "Multi-label checkpoints, exported files, `serve` and Python predict the same labels",
        "serve": "`serve` predicts as `predict`",
        "timm": "A model in timm's layout has the logits of the checkpoint in timm and from `hf://`",
        "prediction-sets": "Prediction sets have the true class in the chosen share, on average, and are the same in "
        "all programs",
    },
    "The same images from every place": {
        "places": "Images in an archive, on the Hugging Face hub or in object storage train the weights of their "
        "folder, bit for bit; requests are sent ahead",
        "table": "A table of images trains the weights of the same class folders, bit for bit",
        "faulty-rows": "A faulty row of a table is reported with file, line and column",
        "image-weights": "An image of weight 2 trains as the image twice; equal weights change nothing",
        "object-storage-failures": "If object storage fails, a run waits, then ends and can be resumed; an image that "
        "changes ends it, too",
        "object-storage-runs": "A run in object storage has the files and weights of a local one, also after a kill",
        "one-writer": "One process writes a run in object storage; a lost connection keeps the local checkpoint",
        "heif": "HEIC and AVIF images are upright and complete, or a line says what to install",
        "class-weights": "All forms of `--class_weights` train the same weights, bit for bit",
    },
    "Bad and hostile input": {
        "one-line": "Bad input gets one line and an exit code, and nothing is lost",
        "no-code": "An untrusted checkpoint runs no code, imports no module and chooses no address",
        "hub-models": "A model on the hub is one commit, safetensors only, and its network is one of timm",
        "hostile-archives": "A hostile archive writes nothing outside of the cache; a kill leaves no part of one",
        "damaged-files": "A damaged or malicious file gives one line, in bounded time and memory",
        "hostile-requests": "`serve` and `review` answer good requests among hostile ones, and lose no decision",
        "nothing-sent": "Nothing is sent: no telemetry, no update checks",
    },
    "Pages and lists": {
        "report": "The report opens from disk",
        "runs": "`finetune runs` shows each run's own result and writes nothing",
        "runs-rm": "`finetune runs rm` deletes only files that finetune wrote in a run, and only with `--yes`",
        "backbones": "`finetune backbones` lists the networks of torchvision and timm",
        "corrections": "A corrected label is saved; no image is changed or moved to another split",
        "review": "During a review, the other images are ranked again by the corrected labels",
        "first-labels": "Without labels, `finetune review` asks about typical images, then about doubtful ones, and "
        "saves each answer",
    },
}
PROMISES = {name: text for group in GROUPS.values() for name, text in group.items()}
