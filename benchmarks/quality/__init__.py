"""How accurate `finetune` is after how many seconds, beside its peers, each with its own recipe, on several sets.

`plan` says what is run in which order, `commands` by which command, `points` what the records come to, `targets` what
was aimed at, `documents` and `chart` show them.
"""
