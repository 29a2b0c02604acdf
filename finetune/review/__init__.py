"""`finetune review`: a page on this machine on which people correct labels. No image is changed, moved or deleted.

- `doubts` orders them, doubtful labels first. `ranking_job` computes what that needs, while the page is open.
- `review_session` has the state: the order, and the decisions in the file of corrections.
- `review_app` has the routes. `review_page.html` is the page.
"""
