"""The settings of all commands: what there is, who says what, and the pages that tell it. Free of torch."""
