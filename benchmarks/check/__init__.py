"""Planted faults that `finetune check` finds, and wrong labels that a review shows first."""
