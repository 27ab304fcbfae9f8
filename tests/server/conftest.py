"""What tests of servers share."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"
