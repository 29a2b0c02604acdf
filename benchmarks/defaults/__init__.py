"""The defaults of `finetune fit` next to a logistic regression on frozen features, from strong and weak weights."""
