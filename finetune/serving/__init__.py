"""Serving a checkpoint over HTTP: a page for people, JSON for programs.

- `app` has the routes, and `service` handles prediction requests.
- `uploads` reads the images of a request, within limits.
- `batcher` batches images of concurrent requests.
- `service_metrics` exports counts to Prometheus.
- `access_log` logs requests. `guard` authorizes them. `refusal` has the error responses.
- `http_server` listens, and shuts down gracefully.
- `openapi` describes the service to programs.

A new route goes into `app`, and its description into `openapi`.
"""
