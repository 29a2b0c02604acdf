"""What each technique gives on four small sets, and which epoch is best kept; see `__main__`.

`watch` runs inside each fit and keeps what was right after each epoch, `documents` makes tables of that.
"""
