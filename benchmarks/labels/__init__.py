"""Images with several labels: `finetune fit labels.csv` beside a plain script and a regression on frozen features."""
