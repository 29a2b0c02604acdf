"""What `finetune check` finds of faults that were planted, what it says of sound pictures, and how long it takes."""
