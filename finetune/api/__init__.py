"""What a program can say, as `commands` is what a user can: `finetune.fit`.

`fitting` makes a command line of its arguments, checks it as the command does and runs it: in this process, of which
`borrowed_process` puts everything back as it was, or on several devices in processes of their own (`child_process`).
`fitted_run` is what comes back.

`finetune.load` needs no command: `inference/loaded_model`.
"""
