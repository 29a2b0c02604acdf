"""What a fit on several devices uses; below the data, since these must know their device's share.

`launch` counts the processes that a cluster has started, `ranks` ends those that Lightning starts together, and
`signals` agrees on when to stop. `global_loss` is the mean loss over the global batch, `empty_shares` what a rank
does without images, `collectives` what ranks ask each other, and `sync_batch_norm` takes batch norm's statistics over
the global batch.

A way of using devices that `fit` offers goes here, is chosen in `commands/trainer`, and is held against one device in
`parity`.
"""
