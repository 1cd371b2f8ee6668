"""API keys: every inference route needs one, no other does, and none is ever written down."""

import logging

import openai
import pytest

from harness.local_server import running
from peagle.errors import ConfigError
from peagle.server.auth import ApiKeys, read_keys
from peagle.server.errors import HttpError

MESSAGES = [{"role": "user", "content": "the"}]


@pytest.fixture(scope="module")
def locked():
    with running(keys=("first-key", "second-key")) as found:
        yield found


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/invocations", "/tokenize", "/detokenize"]
)
def test_inference_routes_need_a_key(locked, path):
    response = locked.http.post(path, json={"messages": MESSAGES})
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["code"] == "missing_api_key" and "Authorization: Bearer KEY" in error["message"]


@pytest.mark.parametrize("path", ["/ping", "/health", "/version", "/metrics", "/openapi.json"])
def test_other_routes_need_none(locked, path):
    assert locked.http.get(path).status_code == 200


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_each_key_opens(locked, key):
    client = locked.client(api_key=key)
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2).usage.completion_tokens == 2
    assert client.models.list().data[0].id == "tiny"


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer first-key-and-more", "Basic first-key", "first-key", "Bearer"]
)
def test_anything_else_does_not_open(locked, header):
    response = locked.http.get("/v1/models", headers={"Authorization": header})
    assert response.status_code == 401


def test_a_wrong_key_is_an_authentication_error_to_the_client(locked):
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.client(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"


def test_keys_and_prompts_are_not_logged(locked, caplog):
    with caplog.at_level(logging.DEBUG, logger="peagle"):
        body = {"messages": [{"role": "user", "content": "a secret question"}], "max_tokens": 2, "user": "anna"}
        locked.http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer first-key"})
        locked.http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer stolen-key"})
    assert "/v1/chat/completions" in caplog.text
    for secret in ("first-key", "stolen-key", "secret question"):
        assert secret not in caplog.text


def test_keys_come_from_a_file_and_from_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfile-key\n\n  other-key  \n")
    keys = read_keys(file, {"PEAGLE_API_KEYS": "one, two\nthree"}, ["given"])
    for key in ("file-key", "other-key", "one", "two", "three", "given"):
        keys.check(f"Bearer {key}")
    for key in ("# ours", "", "ours"):
        with pytest.raises(HttpError):
            keys.check(f"Bearer {key}")
    assert "file-key" not in repr(vars(keys)), "only digests are kept"


def test_without_keys_everybody_may_come_in():
    keys = read_keys(None, {})
    assert not keys
    keys.check(None)
    assert ApiKeys(["x"])


def test_a_file_without_keys_is_refused(tmp_path):
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "keys", {})
    assert "has no API key" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "missing", {})
    assert "cannot be read" in str(caught.value)
