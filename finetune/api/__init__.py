"""The Python interface, as `commands` is that of the command line: `finetune.fit` and `finetune.load`.

`fitting` turns its arguments into a command line (`command_words`), checks it as the command does and
runs it: in this process, which `borrowed_process` restores afterwards, or on several devices in
subprocesses (`child_process`). It returns a `fitted_run`.

`loaded_model` is a checkpoint in a program: it makes a `prediction` for each of `pictures` of any kind, computes their
features, and runs `finetune test` and `finetune export`.
"""
