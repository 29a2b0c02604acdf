"""Counters in the format of Prometheus."""

from prometheus_client.parser import text_string_to_metric_families

from finetune.serving.service_metrics import ServiceMetrics


def test_what_was_done_is_counted():
    metrics = ServiceMetrics(["a", "b c"], lambda: 3)
    for status, seconds in ((200, 0.03), (200, 7.0), (422, 0.5)):
        metrics.count_request(status, seconds)
    metrics.count_predictions(["b c", "b c"])
    metrics.count_batch(2)
    families = text_string_to_metric_families(metrics.text().decode())
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert (
        found["finetune_requests_total", "200"] == 2
        and found["finetune_requests_total", "422"] == 1
    )
    assert (
        found["finetune_pictures_total", "a"] == 0 and found["finetune_pictures_total", "b c"] == 2
    )
    assert found["finetune_request_seconds_count",] == 2  # of good ones
    assert found["finetune_request_seconds_bucket", "0.05"] == 1
    assert found["finetune_batch_size_sum",] == 2 and found["finetune_waiting_pictures",] == 3
    assert found["process_resident_memory_bytes",] > 1e6


def test_two_services_in_a_process_count_for_themselves():
    first, second = (ServiceMetrics(["a"], lambda: 0) for _ in range(2))
    first.count_request(200, 1.0)
    assert b'finetune_requests_total{status="200"} 1.0' in first.text()
    assert b'finetune_requests_total{status="200"}' not in second.text()
