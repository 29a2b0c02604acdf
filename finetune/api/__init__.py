"""The Python interface: `finetune.fit` and `finetune.load`. The package `commands` is the command line.

`python_fit` makes layers of settings of its arguments, and calls what the command calls. A fit on one device runs in
this process, which `program_process` restores afterwards. On several devices, or with folds, it runs in subprocesses,
by its plan in a file. The result is a `fitted_run`.

`loaded_model` is a checkpoint in a program. It returns a `Prediction` for each image (`image_inputs` lists the accepted
types), computes features, and runs `finetune test` and `finetune export`.

Both ways of running a fit are needed. Only in this process are the lines of a notebook, and the classes of the calling
program, such as `options={"model.optimizer": "__main__.Mine"}`. Only in subprocesses can it use several devices.
"""
