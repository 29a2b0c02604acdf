"""What a fit on several devices uses; below the data, since these must know their device's share.

`launch` counts the processes that a cluster has started, `ranks` and `spawned` see to those that Lightning starts,
`signals` agrees on when to stop. `batch_share` says which part of a batch is this device's, and `collectives` is what
devices ask each other of it. `sync_batch_norm` takes statistics over all of it, `mesh_strategy` spreads a network over
a mesh, its head by `tensor_parallel`.

A way of using devices that `fit` offers goes here, is chosen in `commands/trainer`, and is held against one device in
`parity`.
"""
