"""What is wrong with a data set: looked for before training, and never judged by training.

`picture_facts` looks at each picture once. `checks` judges files and classes by that, `exact_duplicates` and
`duplicates` find copies, the latter by `perceptual_hash` and `rough_fit`, `shortcuts` what gives a class or a split
away, `spreadsheet_names` names that a spreadsheet would run. All these are `findings`, which `check_page` writes.
`first_look` is the part of it that every fit does.

Another thing that may be wrong with pictures goes here; what a network has to see for it, to `features/`.
"""
