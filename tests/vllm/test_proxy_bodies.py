"""What the proxy makes of bodies and counters, without a process behind it."""

import pytest

from peagle.checkpoint.card import Baseline
from peagle.vllm.proxy_bodies import as_error, request_fields
from peagle.vllm.proxy_metrics import WINDOW_DRAFTS, ProxyMetrics


def test_the_window_of_acceptance_forgets_what_was_long_ago():
    metrics = ProxyMetrics("m", 5, 2, baseline=Baseline(3.0, "card"))
    for step in range(1, 11):
        metrics.add(float(step), WINDOW_DRAFTS * step, 2 * WINDOW_DRAFTS * min(step, 5))
    assert metrics.acceptance_length() == (1.0, WINDOW_DRAFTS), "nothing has been accepted since the fifth sample"
    assert metrics.has_drifted()
    metrics.add(10.1, WINDOW_DRAFTS * 11, 2 * WINDOW_DRAFTS * 6)
    assert metrics.acceptance_length()[0] > 1, "scrapes close to each other share one sample"
    metrics.add(20.0, 10, 5)
    assert metrics.acceptance_length() == (None, 0), "counters that began again begin the window again"


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, b'{"error": {"message": "no", "code": 400}}', "no"),
        (401, b'{"error": "Unauthorized"}', "Unauthorized"),
        (404, b'{"detail": "Not Found"}', "Not Found"),
        (500, b"<html>", "the engine failed this request; see the server's log"),
        (503, b"", "the engine returned status 503"),
    ],
)
def test_every_form_of_a_refusal_is_understood(status, content, message):
    error = as_error(status, content)
    assert (error.status, error.message) == (status, message)
    assert ("Retry-After" in error.headers) == (status == 503)


def test_an_engine_that_describes_nothing_has_its_fields_unchecked():
    assert request_fields({}) == {} and request_fields({"paths": {"/x": {"get": {}}}}) == {}
