"""The promises, in the order of docs/promises.md: the name of each, which is also its anchor there, and its text."""

PROMISES = {
    # the same run on any number of devices
    "any-number-of-devices": "The same weights on any number of devices, to rounding",
    "random-numbers": "Order, augmentation, mixing and dropout are functions of (seed, epoch or step, image)",
    "batch-norm": "Batch norm takes its statistics from all images of the batch on any number of devices, also if the "
    "number does not divide the batch",
    "each-image-once": "Each image counts once; predictions are in the order of the input",
    "exact-metrics": "Metrics, temperature, calibration and thresholds are those of all devices' images",
    "equal-ranks": "Ranks that found different images or labels do not start",
    # an honest result
    "interval": "The interval of a mean average precision contains the true value, also if labels occur together",
    "group-answers": "A group of images has one answer in `test` and `predict`: exactly the mean of the log "
    "probabilities of its images, of several labels the largest probability, on any number of devices",
    "groups": "Images of a group share a split, and each image is tested in one fold",
    "folds": "The result of a cross-validation is that of all its images, and no image is measured with a threshold "
    "that was chosen on it",
    "unseen": "A test measures no image that was trained on, and no copy of one",
    "best-weights": "A fit from a fitted head keeps the weights before training if each epoch is more than a standard "
    "error worse on the validation images",
    "familiarity": "With `--none_below P` on average at most the share P of new images of the classes is predicted as "
    "`none`",
    "solved-head": "The head of a frozen network is the optimum of a logistic regression on the pooled features of its "
    "last stages",
    "frozen": "Frozen layers do not change, batch norm included",
    # interrupted equals uninterrupted
    "resume": "A run that was interrupted and resumed equals one that was not",
    "stop": "Ctrl-C and SIGTERM save and end every process",
    "lost-rank": "If a rank hangs, the run ends within about 10 minutes, with one line and a complete checkpoint",
    "complete-files": "A checkpoint on disk is complete or absent",
    "kills": "A command that is killed, is paused or cannot write at a random moment has the usual result when it is "
    "started again",
    "keep-last": "A run without last.ckpt (`--keep_last false`) predicts as before and is not resumed",
    "run-name": "`--name` names a new run and, with `--resume`, the run to continue",
    # one prediction, whatever the program
    "preparation": "Images are prepared for prediction as for training",
    "pad": "`--data.resize pad` shows the network the complete image in `predict`, exported files and `serve`",
    "export": "An exported file predicts as the checkpoint",
    "multi-label": "Several labels: checkpoint, exported files, `predict`, `serve` and Python predict the same sets of "
    "labels",
    "serve": "`serve` predicts as `predict`",
    "timm": "A model in timm's layout has the same logits in timm as the checkpoint, and `hf://OWNER/NAME` predicts as "
    "the checkpoint",
    "prediction-sets": "Prediction sets (`--coverage`) have the true class in the chosen share, on average, and are "
    "the same in `predict`, `test`, `serve`, exported files and Python, on any number of devices",
    # the same images, wherever they are
    "table": "A table of images trains the weights of the same images in class folders, bit for bit",
    "faulty-rows": "A faulty row of a table is one line with file, line and column",
    "image-weights": "A weight of 2 of an image in a table acts as the image twice in training, on any number of "
    "devices; equal weights change nothing, bit for bit",
    "archives": "An archive of images, also in object storage, trains the weights of its folder, bit for bit",
    "hub-datasets": "Images in a dataset of the Hugging Face hub train the weights of the same folder on a disk, "
    "bit for "
    "bit",
    "object-storage": "Images in object storage train the weights of the same folder on a disk, bit for bit, with one "
    "listing, and requests are sent ahead",
    "object-storage-failures": "An image in object storage that is replaced during a run ends it with its name; a "
    "server "
    "that is gone is waited for, then the run ends and can be resumed; Ctrl-C and SIGTERM end the wait",
    "object-storage-runs": "A run in object storage has the files and weights of a local one. After a kill before any "
    "upload, `--resume` on an empty machine ends in the same weights",
    "one-writer": "One process writes a run in object storage; if the storage is gone, the run ends in one line "
    "and keeps "
    "its local checkpoint",
    "heif": "HEIC and AVIF images are upright, complete and within the limits, or a line says what to install",
    "class-weights": "`--class_weights` as text or a file trains as `balanced` with the same weights, bit for bit, and "
    "needs no file to resume",
    # bad and hostile input
    "one-line": "Bad input gets one clear line and an exit code, and nothing is lost",
    "no-code": "An untrusted checkpoint runs no code, imports no module and chooses no address",
    "hub-models": "A model on the hub is loaded from one commit and from safetensors only, and its config cannot "
    "choose "
    "code: its network is one of timm",
    "hostile-archives": "A hostile archive of images is one line and writes nothing outside of the cache; a killed "
    "command leaves no part that is taken for complete",
    "damaged-files": "A damaged or malicious image, checkpoint, table, config or file of a run gives one line: no "
    "crash, "
    "no code of it runs, time and memory are bounded",
    "hostile-requests": "`serve` and `review` answer good requests among hostile ones, and no saved decision is lost",
    "nothing-sent": "Nothing is sent: no telemetry, no update checks",
    # what a user sees
    "report": "The report opens from disk",
    "runs": "`finetune runs` shows each run's own result and writes nothing",
    "runs-rm": "`finetune runs rm` deletes runs only, only the files that finetune wrote, and only with `--yes`",
    "backbones": "`finetune backbones` lists the networks of torchvision and timm",
    "corrections": "A label that was corrected is saved, and no image is changed or moved to another split",
    "review": "During a review, the images that were not shown are ranked again by the corrected labels",
    "first-labels": "Of images without labels, `finetune review` asks first about typical images, then about those of "
    "which a head is least sure; its file is a table of the last answers, also if it was killed",
}
