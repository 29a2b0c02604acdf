"""`finetune review`: a page on this machine to correct labels, or give the first ones. No image is changed or moved.

- `doubts` orders them, doubtful labels first. `questions` chooses which images without labels to ask about.
- `ranking_job` computes what that needs, while the page is open.
- `review_session` has the state: the order, and the decisions in the file of corrections.
- `review_app` has the routes. `review_page.html` is the page.
"""
