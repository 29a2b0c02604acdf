"""How good the network is that `finetune fit --backbone auto` chooses."""
