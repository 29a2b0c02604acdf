"""What a fit on several devices uses, below the data, which must know their share.

`launch` counts the processes that a cluster has started, `ranks` and `spawned` see to those that Lightning starts,
`signals` agrees on when to stop. `batch_share` says which part of a batch is this device's. `sync_batch_norm` takes
statistics over all of it, `mesh_strategy` spreads a network over a mesh, its head by `tensor_parallel`. Why they are
right is shown in `parity`.
"""
