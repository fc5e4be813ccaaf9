import msgspec
import pytest

from rollplane.engines.grpc.settings import GrpcSettings, check_base_url, is_loopback
from rollplane.errors import InvalidRequest


@pytest.mark.parametrize(
    "url", ["http://h:8000", "https://h", "http://h/prefix/", "http://127.0.0.1:80/a/b", "http://[::1]:9"]
)
def test_a_plain_base_url_is_fine(url):
    check_base_url(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("h:8000", "must be http"),
        ("ftp://h", "must be http"),
        ("http://", "must be http"),
        ("http:///prefix", "must be http"),
        ("http://user@h", "user name"),
        ("http://user:secret@h", "user name"),
        ("http://@h", "user name"),
        ("http://h?x=1", "no query"),
        ("http://h?", "no query"),
        ("http://h/#part", "no fragment"),
        ("http://h:0", "port 0"),
        ("http://h:99999", "not a URL"),
        ("http://h:x", "not a URL"),
    ],
)
def test_another_url_is_refused(url, why):
    with pytest.raises(InvalidRequest, match=why) as refused:
        check_base_url(url)

    assert "secret" not in refused.value.message


@pytest.mark.parametrize("endpoint", ["h", "h:", ":1", "h:0", "h:65536", "h:x", "http://h:1", "h:1/x", ""])
def test_an_endpoint_is_host_and_port(endpoint):
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        GrpcSettings(endpoint=endpoint).check()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"channels": 0}, "channels"),
        ({"max_receive_bytes": 0}, "max_receive_bytes"),
        ({"start_timeout_s": 0.0}, "start_timeout_s"),
        ({"call_timeout_s": -1.0}, "call_timeout_s"),
        ({"max_logprobs": -1}, "max_logprobs"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_loras": 0}, "max_loras"),
        ({"tls_cert_file": "a", "tls": True}, "tls_cert_file"),
        ({"tls_ca_file": "a"}, "tls_ca_file"),
        ({"http_endpoint": "x"}, "http_endpoint"),
        ({"endpoint": "10.0.0.1:1", "token_file": "t"}, "token_file"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, param):
    with pytest.raises(InvalidRequest) as refused:
        msgspec.structs.replace(GrpcSettings(), **changes).check()

    assert refused.value.param == param


def test_a_token_stays_on_the_machine_or_under_tls():
    GrpcSettings(endpoint="127.0.0.1:1", token_file="t").check()
    GrpcSettings(endpoint="10.0.0.1:1", token_file="t", tls=True).check()

    assert [is_loopback(each) for each in ("localhost:1", "[::1]:1", "127.0.0.9:1", "10.0.0.1:1", "h:1")] == [
        True,
        True,
        True,
        False,
        False,
    ]
