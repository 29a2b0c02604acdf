"""Files, caches, the machine and messages. This lowest package imports neither torch nor our other packages.

- `messages` has error messages and their exit codes. `terminal` writes to outputs that may be closed, and `progress`
  shows the progress of a long job. `html_page` renders pages of one file.
- `files` writes files atomically. `file_names` composes Unicode. `cache_dir` is the folder of caches, `process_folder`
  that of the files of one process.
- `machine` describes the processor, and sets its threads and the memory allocator.
- `interpreter` pauses garbage collection, and handles exceptions that Python cannot raise. `killed_worker` recognises a
  killed DataLoader worker. `daemon_threads` starts threads that do not delay the end of the process.

Modules that any program could use belong here.
"""
