"""Who is the admin, and who only says so."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request

from app.admin import COOKIE, Admin
from app.config import AppConfig
from app.errors import NotSignedIn, TooMany
from app.security import Secret
from app.views.admin import slots
from app.views.frame import Frame, View
from app.views.words import words_for
from db.errors import DatabaseUnavailable
from tests.app.running import ADMIN_PASSWORD


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(address: str = "192.0.2.1", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw, "client": (address, 1)})


def make(folder, clock=None, **settings) -> Admin:
    settings = {"admin_password": ADMIN_PASSWORD} | settings
    return Admin(AppConfig(data_folder=folder, **settings), Secret(folder), clock=clock or Clock())


def test_the_right_password_opens_a_session_that_ends(tmp_path):
    clock = Clock()
    admin = make(tmp_path, clock)
    cookie = admin.sign_in(request(), ADMIN_PASSWORD)
    assert admin.auth_dependency(request(cookie=f"{COOKIE}={cookie}")) == "admin"
    clock.now += 13 * 3600
    assert admin.auth_dependency(request(cookie=f"{COOKIE}={cookie}")) is None


@pytest.mark.parametrize("change", ["x{}", "{}x", "9{}", "{}.", ".{}", "", "admin", "é", "99999999999.aa.bb"])
def test_a_forged_cookie_opens_nothing(tmp_path, change):
    admin = make(tmp_path)
    cookie = change.format(admin.sign_in(request(), ADMIN_PASSWORD))
    forged = {"type": "http", "headers": [(b"cookie", f"{COOKIE}={cookie}".encode())], "client": ("192.0.2.1", 1)}
    assert admin.auth_dependency(Request(forged)) is None


def test_a_new_password_ends_every_session(tmp_path):
    cookie = make(tmp_path).sign_in(request(), ADMIN_PASSWORD)
    assert make(tmp_path).auth_dependency(request(cookie=f"{COOKIE}={cookie}")) == "admin", "a restart does not"
    other = make(tmp_path, admin_password="another password")
    assert other.auth_dependency(request(cookie=f"{COOKIE}={cookie}")) is None


def test_wrong_tries_must_wait_longer_and_longer(tmp_path):
    clock = Clock()
    admin = make(tmp_path, clock)
    for _ in range(3):
        with pytest.raises(NotSignedIn):
            admin.sign_in(request(), "wrong")
    with pytest.raises(TooMany, match="wait 1 s"):
        admin.sign_in(request(), ADMIN_PASSWORD)
    clock.now += 1.1
    with pytest.raises(NotSignedIn):
        admin.sign_in(request(), "wrong")
    with pytest.raises(TooMany, match="wait 2 s"):
        admin.sign_in(request(), "wrong")
    assert admin.sign_in(request("192.0.2.2"), ADMIN_PASSWORD), "another address has its own tries"
    clock.now += 2.1
    assert admin.sign_in(request(), ADMIN_PASSWORD)
    with pytest.raises(NotSignedIn):
        admin.sign_in(request(), "wrong")


def test_ever_so_many_wrong_tries_are_still_too_many(tmp_path):
    clock = Clock()
    admin = make(tmp_path, clock, admin_key="a key for programs")
    for _ in range(1100):
        with pytest.raises(NotSignedIn):
            admin.require(request(authorization="Bearer wrong"))
        clock.now += 301
    clock.now -= 301
    with pytest.raises(TooMany, match="wait 300 s"):
        admin.require(request(authorization="Bearer wrong"))


def test_a_household_has_one_count_of_tries(tmp_path):
    admin = make(tmp_path)
    for number in range(3):
        with pytest.raises(NotSignedIn):
            admin.sign_in(request(f"2001:db8::{number}"), "wrong")
    with pytest.raises(TooMany):
        admin.sign_in(request("2001:db8::ffff"), ADMIN_PASSWORD)
    assert admin.sign_in(request("2001:db8:0:1::1"), ADMIN_PASSWORD)


def test_a_made_up_password_is_told_once_and_kept_as_a_hash(tmp_path):
    told = []
    config = AppConfig(data_folder=tmp_path)
    for _ in range(2):
        admin = Admin(config, Secret(tmp_path), announce=told.append)
    (password,) = told
    assert admin.sign_in(request(), password)
    kept = (tmp_path / "admin_password.json").read_text()
    assert password not in kept and set(json.loads(kept)) == {"salt", "hash"}
    assert (tmp_path / "admin_password.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "secret.key").stat().st_mode & 0o077 == 0
    for guess in ("", "admin", "password"):
        with pytest.raises((NotSignedIn, TooMany)):
            admin.sign_in(request("192.0.2.9"), guess)


def test_the_bearer_key_is_the_configured_one_or_the_password(tmp_path):
    make(tmp_path).require(request(authorization=f"Bearer {ADMIN_PASSWORD}"))
    keyed = make(tmp_path, admin_key="a key for programs")
    keyed.require(request(authorization="bearer a key for programs"))
    for header in ("Bearer wrong", "Basic abc", "Bearer", f"Bearer {ADMIN_PASSWORD}"):
        with pytest.raises((NotSignedIn, TooMany)):
            keyed.require(request(authorization=header))


def test_the_command_line_of_this_machine_has_a_key_of_its_own(tmp_path):
    admin = Admin(AppConfig(data_folder=tmp_path, admin_key="a key for programs"), Secret(tmp_path), local_key="local")
    admin.require(request(authorization="Bearer local"))
    admin.require(request(authorization="Bearer a key for programs"))
    with pytest.raises(NotSignedIn):
        make(tmp_path).require(request(authorization="Bearer "))
    for _ in range(3):
        with pytest.raises(NotSignedIn):
            admin.require(request(authorization="Bearer wrong"))
    admin.require(request(authorization="Bearer local"))


def test_over_http_the_session_is_a_strict_cookie(site):
    with httpx.Client(base_url=site.url) as browser:
        assert browser.get("/api/admin/models").status_code == 401
        assert browser.post("/api/admin/models", json={"name": "x", "source": "path:/x"}).status_code == 401
        assert browser.post("/api/admin/login", json={"password": "wrong"}).status_code == 401
        signed_in = browser.post("/api/admin/login", json={"password": ADMIN_PASSWORD})
        assert signed_in.status_code == 204
        cookie = signed_in.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
        assert browser.get("/api/admin/models").status_code == 200
        foreign = {"Origin": "https://evil.example"}
        refused = browser.post("/api/admin/models", json={"name": "x", "source": "path:/x"}, headers=foreign)
        assert refused.status_code == 403
        assert browser.post("/api/admin/logout").status_code == 204
        assert browser.get("/api/admin/models").status_code == 401


def test_cookies_are_secure_behind_https(tmp_path, engine):
    from tests.app.running import Website

    with Website(tmp_path, engine_url=engine.url, trusted_proxies=("127.0.0.1",)) as site:
        plain = httpx.post(f"{site.url}/api/notice").headers["set-cookie"]
        secured = httpx.post(f"{site.url}/api/notice", headers={"X-Forwarded-Proto": "https"}).headers["set-cookie"]
        assert "Secure" not in plain and "Secure" in secured


def test_part_of_the_view_that_is_asked_for_anew_costs_only_itself():
    request = Request({"type": "http", "headers": [], "query_string": b"part=source-help"})
    nobody_is_asked = SimpleNamespace(registry=None, database=None)
    assert asyncio.run(slots(request, nobody_is_asked, words_for("en"))).keys() == {"source-help"}


@pytest.mark.parametrize("query", [b"", b"part=x"])
def test_page_whose_database_does_not_answer_says_so_and_shows_no_error_of_ours(query, caplog):
    async def away(request, services, words):
        raise DatabaseUnavailable("locked")

    view = View("/x", "x", None, away)
    frame = Frame(None, views=[view], lost=view, services=None, signed_in=lambda request: True)
    request = Request({"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": query})
    response = asyncio.run(frame.answer(view, request))
    assert response.status_code == 503 and response.body.decode() == words_for("en")["no_database"]
    assert [(line.path, line.reason) for line in caplog.records] == [("/x", "locked")]
