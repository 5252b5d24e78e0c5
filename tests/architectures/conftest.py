from collections.abc import Iterator

import pytest

from workers import Pool, started_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with started_pool() as pool:
        yield pool
