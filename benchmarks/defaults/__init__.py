"""The defaults of `finetune fit` beside a logistic regression on frozen features, from strong and from weak weights."""
