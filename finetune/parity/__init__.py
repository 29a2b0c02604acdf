"""Every way of using several devices, written to be read, and held against one device; no fit uses these.

docs/parallelism.md tells of them. `data_parallel` is data parallelism on tensors, without a framework; `pipeline` is
a network in parts, one a process; `tensor_parallel` spreads layers over devices, `branches` has a device for each
branch. One piece more is that of a real fit: `distributed/sync_batch_norm` for statistics over all devices.
`communication_volume` counts the bytes that each sends. `one_process` and `many_processes` run the same job in every
way, for `finetune parity` to compare.
"""
