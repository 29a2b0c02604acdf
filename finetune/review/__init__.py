"""`finetune review`: a page on this machine on which people correct labels. No image is changed, moved or deleted.

- `review_images` lists the images of a data set, with their labels.
- `doubts` orders them, doubtful labels first. `ranking_job` computes what that needs, while the page is open.
- `review_session` has the state: the order, and the `decisions` in the file of corrections.
- `image_previews` scales images when the page asks for them.
- `review_app` has the routes. `review_page.html` is the page.
"""
