"""Serving a checkpoint over HTTP: a page for people, JSON for programs.

- `app` has the routes, and `service` handles prediction requests.
- `uploads` reads the images of a request, within limits.
- `batcher` batches images of concurrent requests.
- `service_metrics` exports counts to Prometheus.
- `access_log` logs requests. `guard` authorizes them. `refusal` has the error responses.
- `http_server` listens, and shuts down gracefully.
- `openapi` makes the description of the service from its handlers and from `response_types`.

A new route goes into `app`; its handler is `described`, and the fields of its answer are a type in `response_types`.
"""
