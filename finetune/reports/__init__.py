"""The pages: the report of a run, the comparison of runs, the page of `finetune check`, and the model card.

- `report` writes report.html; `report_page` gives it what the best checkpoint sees, `live_report` writes it during the
  run, and `inline_report` is a short one for a notebook. `comparison` compares runs, `check_page` shows findings.
- Parts of pages: `class_metrics` is the table of classes or labels, `class_sections` their matrix and images,
  `test_images` loads images and chooses the most informative ones, `calibration_charts` and `charts` draw.
- `model_card` is in Markdown. Templates lie beside their modules; `blocks.html` is what they share.

Another page, or another section of one, goes here.
"""
