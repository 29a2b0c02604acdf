"""Accuracy against seconds of `finetune` and its peers, each with its own recipe, on several sets.

`plan` has the runs in their order, `commands` their commands, `points` the results of each tool, `targets` what was
aimed at; `documents` and `chart` show them.
"""
