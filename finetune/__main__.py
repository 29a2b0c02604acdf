"""`python -m finetune`, and what torchrun starts: the same as the `finetune` command."""

from finetune.cli import main

main()
