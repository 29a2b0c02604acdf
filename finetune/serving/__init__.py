"""Serving a checkpoint over HTTP: a page for people, JSON for programs.

- `app` has the routes, and `service` handles prediction requests.
- `schemas` has the options and the answers, of which FastAPI makes the OpenAPI description.
- `uploads` reads the images of a request. `batcher` batches images of concurrent requests.
- `guard` limits requests, `errors` has the error responses, `access_log` counts requests for Prometheus and logs them.
- `http_server` listens, and shuts down gracefully.

A new route goes into `app`; the fields of its answer are a model in `schemas`.
"""
