"""What tests of replicas share."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def cluster():
    """This process is connected to a Ray of its own, with room for four replicas."""
    pytest.importorskip("ray")
    from treewise.replicas.cluster import connected

    with connected(cpus=4):
        yield
