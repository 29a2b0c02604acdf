"""What `finetune demo` shows: the main job on images drawn by code, offline.

`drawing` draws the images, `sample_data` is their data module, `finetune.SampleData`, and `demo` is the command. No
other package needs any of this, so that it can be left out of a reading of the library.
"""
