"""Connections that another thread can break off."""

import pytest
import urllib3

from tests.launches import free_port
from verl.utils.watched_http import describe_failure, watched_pools


@pytest.mark.parametrize("retries", [False, 0, 1])
def test_a_failure_is_described_without_names_of_classes(retries: int | bool):
    with pytest.raises(urllib3.exceptions.HTTPError) as raised:
        watched_pools(retries=retries).request("GET", f"http://127.0.0.1:{free_port()}/")
    assert describe_failure(raised.value).startswith("Failed to establish a new connection: ")
