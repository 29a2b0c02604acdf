"""A checkpoint that answers requests: a page for people, JSON for programs.

`app` has the addresses. `service` is what happens to a request with pictures: `uploads` takes them out of it, under
limits, they wait for each other in `batcher` only while the network is busy, and `service_metrics` counts them.
`guard` says who may ask, `refusal` what is told to whom gets no answer.
`http_server` listens, and stops when it is asked to, with nothing left unanswered. `openapi` says all of this to
programs, the templates to people.

A new address goes into `app`, and its description into `openapi`.
"""
