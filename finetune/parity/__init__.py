"""Short, readable implementations of every kind of parallelism, which `finetune parity` compares with one device.

No fit uses them, except that `distributed/sync_batch_norm` belongs to fits too. docs/parallelism.md describes them.

- `data_parallel`: data parallelism on tensors, without a framework.
- `pipeline`: pipeline parallelism, with one part of the network per process.
- `tensor_parallel`: linear layers that are sharded over devices.
- `branches`: a network with one device per branch.
- `ways`: trains the same job in every way.
"""
