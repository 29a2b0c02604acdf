"""Images with several labels: `finetune fit labels.csv` next to a plain script and a regression on frozen features."""
