"""One fake engine and one website for all tests that change neither's settings; each test is a visitor of its own."""

from __future__ import annotations

import pytest

from tests.app.fake_engine import FakeEngine
from tests.app.running import Website


# Of the package, not the session: they would work on under the tests that come after.
@pytest.fixture(scope="package")
def shared_engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="package")
def shared_site(shared_engine, tmp_path_factory):
    settings = {"battles_per_address": 10_000, "reveal_characters_per_second": 1000.0}
    with Website(tmp_path_factory.mktemp("site"), engine_url=shared_engine.url, **settings) as site:
        yield site.ready()


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    shared_engine.scripts.clear()
    shared_engine.asked.clear()


@pytest.fixture
def site(shared_site, engine):
    return shared_site


@pytest.fixture
def visitor(site):
    with site.visitor() as visitor:
        yield visitor
