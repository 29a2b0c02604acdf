"""Training on several devices. The data package imports this one, since it needs the rank and the world size.

- `launch`: the processes that torchrun or srun has started.
- `ranks`: end the processes that Lightning has started if one of them ends.
- `waits`: end a run in which a rank neither works nor ends.
- `child_command`: a `finetune` command in a subprocess.
- `signals`: stop all ranks at the same step.
- `collectives`: all-reduce and process groups.
- `global_loss`: the mean loss over the global batch, also if a rank has no images of it.
- `sync_batch_norm`: batch norm with the statistics of the global batch.

A new way to train on several devices goes here. `commands/trainer` selects it. `parity` compares it with one device.
"""
