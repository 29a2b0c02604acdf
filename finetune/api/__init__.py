"""What a program can say, as `commands` is what a user can: `finetune.fit` and `finetune.load`.

`fitting` makes a command line of its arguments (`command_words`, with the hints of `argument_hints`), checks it as the
command does and runs it: in this process, of which `borrowed_process` puts everything back as it was, or on several
devices in processes of their own (`child_process`). `fitted_run` is what comes back.

`loaded_model` is a checkpoint in a program: it predicts `pictures` of any kind, a `prediction` for each, computes their
features, and runs `finetune test` and `finetune export`.
"""
