"""Tables of images: a row for each image, with its path and its labels.

- `table_file`: reads a .csv, .tsv, .jsonl or .parquet file.
- `table_columns`: finds the columns of the path, the labels, the split, the weight and the group.
- `table_labels`: the labels of each row, one or several.
- `table_rows`: the rows of a table, each an image with its labels, split, group and weight.
- `row_faults`: what is wrong with a row, by file, line and column.

`datasets.table_source` turns a table into the splits of a data module.
"""
