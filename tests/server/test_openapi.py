"""The server keeps to its own OpenAPI description, whatever is sent by it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from threaded import served
from tiny import ChatBytes, tiny_llm, tiny_model

schemathesis = pytest.importorskip("schemathesis")
EXCLUDED = [schemathesis.checks.positive_data_acceptance]  # fields depend on each other as no schema says
THOROUGH = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def description() -> Iterator[object]:
    llm = tiny_llm(tiny_model(max_positions=96), codec=ChatBytes())
    with served(llm, max_n=4, max_prompts=4, max_search_tokens=256) as server:
        yield schemathesis.openapi.from_url(server.url + "openapi.json")


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_requests_by_the_description_are_answered_by_it(description, mode):
    operations = [found.ok() for found in description.get_all_operations()]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= {operation.path for operation in operations}
    for operation in operations:
        if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue  # there is nothing to get wrong

        @THOROUGH
        @given(operation.as_strategy(generation_mode=mode))
        def check(case):
            response = case.call(timeout=60)
            case.validate_response(response, excluded_checks=EXCLUDED)

        check()
