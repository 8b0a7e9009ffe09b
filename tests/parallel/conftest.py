import concurrent.futures

import pytest


@pytest.fixture(scope="session")
def compiler():
    """Compiles while the next program is traced: compiling takes nearly all of the time.

    The same threads for all tests: XLA's allocations in ever new threads add up to gigabytes.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        yield pool
