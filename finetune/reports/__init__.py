"""The pages: the report of a run, the comparison of runs, the page of `finetune check`, and the model card.

- `report` writes report.html, `live_report` does so during the run, and `inline_report` is a short one for a notebook.
  `comparison` compares runs, `check_page` shows findings.
- Parts of pages: `class_metrics` has the tables of classes or labels, `test_images` chooses and loads images,
  `calibration_charts` and `charts` draw.
- `model_card` is in Markdown. Templates lie beside their modules; `blocks.html` is what they share.

Another page, or another section of one, goes here.
"""
