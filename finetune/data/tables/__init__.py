"""Tables of images: a row for each image, with its path and its labels.

- `table_file`: reads a .csv, .tsv, .jsonl or .parquet file.
- `table_columns`: finds the columns of the path, the labels, the split, the weight and the group.
- `table_labels`: the labels of each row, one or several.
- `table_rows`: the path, split, group and weight of each row.
- `table_listing`: all of it as the images of a place.
"""
