"""Training: the LightningModule and everything that a training step uses.

- `classifier`: the LightningModule, with all its hooks.
- `task`: the loss, metrics, decisions and calibration for images with one class each, or with several labels.
- `loss`: cross entropy for one class or several labels, with class weights, label smoothing and mixed images.
- `metrics`: sums of loss and accuracy over the training images of an epoch.
- `outputs`: the outputs for the images of an evaluation, gathered on rank 0 in the order of the images.
- `measure`: all metrics of an evaluation, from its outputs.
- `dropout`: dropout that gives the same result on any number of devices.

Optimization:

- `fitted_head`: fits the head before the first step, and measures it.
- `optimizers`: parameter groups, and optimizers that update all weights in one pass over memory.
- `lr_schedulers`: the learning rate over the steps of a run.
- `precision`: the default precision.
- `compile`: compiles the network by torch.

Calibration, fitted on the validation split:

- `calibration`: probabilities and decisions from logits: a temperature, or a scale and a bias of each label.
- `threshold`: the decision threshold for two classes, and those of several labels.
- `prediction_sets`: sets of classes that have the true one for a share of the images.
- `prediction`: the prediction for an image, with its columns. `prediction_files` writes predictions.csv and
  test_predictions.csv, whose rows are those of `prediction_rows`.
- `groups`: one answer for the images of a group.
- `finite`: checks that probabilities are finite numbers.

Length of a run:

- `run_length`: the default number of epochs.

Checks, output and checkpoints:

- `first_pass`: checks before training, for example that the network takes images of this size.
- `overview`: the first log lines of a fit, with warnings about the data.
- `progress_bar`: the progress bar and the line of each epoch.
- `augmented_sheet`: an image of augmented training images.

A new loss is a function in `loss`, chosen in `task`. A new weight average, schedule or search for a learning rate is a
module here. Callbacks go with their topic.
"""
