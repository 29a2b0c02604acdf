"""Tables of images: a row for each image, with its path and its labels.

- `table_file`: reads a .csv, .tsv, .jsonl or .parquet file.
- `table_columns`: finds the columns of the path, the labels, the split, the weight and the group.
- `table_rows`: the path, the labels, the split, the group and the weight of each row, as the images of a place.
"""
