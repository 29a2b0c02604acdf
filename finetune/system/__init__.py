"""Files, caches, the machine and messages. This lowest package imports neither torch nor our other packages.

`messages` has error messages and their exit codes. `files` writes files atomically. `file_names` converts file names to
text. `cache_dir` is the folder of caches. `machine` describes the processor and sets the memory allocator. `terminal`
writes to outputs that may be closed. `progress` shows the progress of a long job. `interpreter` pauses garbage
collection, and handles exceptions that Python cannot raise. `killed_worker` recognises a killed DataLoader worker.
`openmp` decides how its threads wait. `daemon_threads` starts threads that do not delay the end of the process.
`html_page` renders pages of one file.

Modules that any program could use belong here.
"""
