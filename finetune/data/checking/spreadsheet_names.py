"""Names that a spreadsheet would run as a formula when it opens a CSV file of predictions."""

from collections.abc import Iterator
from pathlib import PurePath

from finetune.data.checking.findings import Finding, Row
from finetune.data.datasets.listing import Listing
from finetune.system.messages import counted, shown

# first characters of a formula in Excel, LibreOffice and Google Sheets
_FORMULA = ("=", "+", "-", "@")


def spreadsheet_findings(listing: Listing) -> Iterator[Finding]:
    """Yield a finding about classes and files whose names begin like a formula."""
    classes = [name for name in listing.class_names if name.startswith(_FORMULA)]
    files = [i for i, path in enumerate(listing.paths) if PurePath(path).name.startswith(_FORMULA)]
    rows = [Row([], f"the class {shown(name)}") for name in classes]
    rows += [Row([i], "the name of the file") for i in files]
    if rows:
        yield Finding(
            "formula_name",
            "note",
            f"{counted(len(rows), 'name')} of classes or files that a spreadsheet would run as a formula",
            "predictions.csv holds names as they are. Import it with its columns as text, or rename what begins with "
            "= + - or @.",
            rows,
        )
