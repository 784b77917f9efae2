"""What `arena votes audit` and `arena visitors` do, for a program with the admin's key."""

from __future__ import annotations

import httpx
import pytest

from db import queries
from tests.app.running import ADMIN_PASSWORD, Website
from tests.app.votes.voters import add_voters


@pytest.fixture
def api(tmp_path, engine):
    with Website(tmp_path, engine_url=engine.url) as site:
        with site.services.database.session() as session:
            add_voters(session, tuple(model.id for model in queries.models(session)))
        key = {"Authorization": f"Bearer {ADMIN_PASSWORD}"}
        with httpx.Client(base_url=f"{site.url}/api/admin", headers=key) as client:
            yield client


def test_suspect_is_told_put_into_quarantine_and_released(api):
    def found() -> list:
        return [(each["visitor"], each["quarantined"]) for each in api.get("/suspects").json()["suspects"]]

    assert found() == [("burst", False)]
    assert api.post("/visitors/burst/quarantine", json={"why": "too fast"}).json() == {"votes": 12}
    assert found() == [("burst", True)] and api.get("/votes").json()["counted"] == 24
    assert api.post("/visitors/burst/release").json() == {"votes": 12}
    assert found() == [("burst", False)] and api.get("/votes").json()["counted"] == 36


def test_quarantine_needs_a_visitor_and_a_reason(api):
    assert api.post("/visitors/nobody/quarantine", json={"why": "x"}).status_code == 404
    assert api.post("/visitors/burst/quarantine", json={"why": ""}).status_code == 422
    assert api.get("/votes").json()["counted"] == 36


@pytest.mark.parametrize("path", ["/suspects", "/visitors/burst/quarantine", "/visitors/burst/release"])
def test_whoever_is_not_signed_in_is_told_nothing(api, path):
    method = "GET" if path == "/suspects" else "POST"
    assert api.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 401
