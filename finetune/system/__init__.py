"""Files, caches, the machine, messages: the ground floor, without torch and without anything else of ours.

`messages` says what a user did wrong, `files` writes whole files or none, `file_names` are their names as text,
`cache_dir` is where caches lie, `machine` is what there is to compute with. `terminal` writes where nobody may be
reading any more, `progress` says how far a long job is, `unraised` hears what Python can't raise, `killed_worker` knows
what the end of one leaves, `quick_process` begins and ends without looking for garbage. `utf8_mode` makes file names
and text independent of the locale. `html_page` makes pages that are one file each.

Here goes what any program would need.
"""
