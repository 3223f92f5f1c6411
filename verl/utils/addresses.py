"""Addresses of services and machines."""

import ipaddress


def is_http(url: str) -> bool:
    """Return whether a text is the address of a service, which a client of HTTP can parse."""
    from urllib3.exceptions import LocationParseError
    from urllib3.util import parse_url  # here, since configurations load this file

    try:
        parts = parse_url(url)
    except LocationParseError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.host)


def is_loopback(host: str) -> bool:
    """Return whether a host, by name or address, is this machine as only it can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
