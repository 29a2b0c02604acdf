"""Whatever ends a run, all its processes end soon, with one line and the right exit code."""

import itertools
import json
from typing import Any

import pytest
from processes import launch
from promise import promise


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = launch("end_scenarios.py", tmp_path_factory.mktemp("ends") / "out", 1, "", "cover")
    return json.loads((out / "results.json").read_text())


@promise("stop")
@pytest.mark.timeout(900)
def test_a_pairwise_cover_of_ends_is_in_time_with_one_line_and_the_right_code(results):
    reported = {
        r["name"]: [*r["wrong"], r["output"][-500:]] for r in results["results"] if r["wrong"]
    }
    assert reported == {}


def test_what_is_tried_holds_every_pair_of_circumstances(results):
    tried = [r["name"].split("-") for r in results["results"]]
    for (i, a), (j, b) in itertools.combinations(enumerate(zip(*tried, strict=True)), 2):
        missing = set(itertools.product(set(a), set(b))) - {
            (scenario[i], scenario[j]) for scenario in tried
        }
        # there must be such a worker
        impossible = {(x, y) for x, y in missing if "idle" in x or "busy" in x}
        assert missing == impossible
    assert [len(set(values)) for values in zip(*tried, strict=True)] == [9, 7, 3, 3, 2]
