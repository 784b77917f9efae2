"""The admin's view: nobody gets in without the password; models are registered, watched, switched off and retired."""

from __future__ import annotations

import httpx
import pytest

from app.model_rules import SOUND_SAMPLING
from db import queries
from tests.app.running import ADMIN_PASSWORD
from tests.app.votes.voters import add_voters


@pytest.fixture
def admin(site, open_site):
    return open_site(site, "/admin/login").signed_in(ADMIN_PASSWORD).go("/admin")


def test_admin_leads_to_the_login_and_a_wrong_password_says_so(site, open_site):
    visit = open_site(site, "/admin")
    assert visit.page.url.endswith("/admin/login")
    visit.page.fill("#admin-password", "not it")
    visit.page.click("#admin-login button")
    visit.page.wait_for_selector("#admin-login-said:has-text('not right')")
    assert visit.page.locator("#admin-models").count() == 0
    visit.sign_in(ADMIN_PASSWORD)
    assert visit.page.url.endswith("/admin")
    visit.page.click("#logout")
    visit.page.wait_for_url("**/")
    visit.go("/admin")
    assert visit.page.url.endswith("/admin/login")


def test_nothing_of_the_admins_is_served_to_others(site):
    client = httpx.Client(base_url=site.url)
    for path in ("/admin", "/zh/admin", "/admin?part=admin-models"):
        assert client.get(path).headers["location"] == "/admin/login"
    assert client.get("/admin/config").status_code == 401
    event = {"data": [], "fn_index": 1, "session_hash": "x"}
    assert client.post("/admin/gradio_api/queue/join", json=event).status_code == 401
    assert client.post("/admin/gradio_api/run/predict", json=event).status_code == 401


def test_wrong_fields_are_named_beside_themselves_and_nothing_is_registered(admin, engine):
    before = dict(engine.models)
    admin.register(name="alpha", source="nonsense", temperature="hot", endpoint_key_env="MY_KEY")
    admin.page.wait_for_selector("#field-source.invalid")
    assert "not a source" in admin.page.inner_text("#field-source")
    assert "number" in admin.page.inner_text("#field-temperature")
    admin.eventually("document.querySelector('#field-source :is(input, textarea)').ariaInvalid === 'true'")
    admin.register(source="path:/alpha", temperature="0.5")
    admin.page.wait_for_selector("#field-endpoint_key_env.invalid")
    assert admin.page.locator("#field-source.invalid").count() == 0
    admin.register(endpoint_key_env="")
    admin.page.wait_for_selector("#field-name.invalid")
    assert "alpha" in admin.page.inner_text("#field-name")
    assert engine.models == before


def test_registered_model_is_watched_loading_and_takes_part(admin, site, engine):
    engine.loading.add("delta")
    admin.register(name="delta", source="path:/delta", system_prompt="Talk like a pirate.", temperature="0.5")
    row = admin.model("delta")
    row.locator("progress").wait_for()
    assert "50" not in row.locator(".chip").inner_text()
    assert row.locator("progress").get_attribute("value") == "50"
    engine.loading.clear()
    row.locator(".chip.ready").wait_for()
    assert engine.models["delta"]["system_prompt"] == "Talk like a pirate."
    assert engine.models["delta"]["sampling"] == SOUND_SAMPLING | {"temperature": 0.5}
    assert httpx.get(f"{site.url}/api/status").json()["ready_models"] == 3
    assert admin.field("name").input_value() == ""
    row.get_by_role("button", name="Disable delta").click()
    row.locator(".chip.disabled").wait_for()
    row.get_by_role("button", name="Retire delta").click()
    row.get_by_role("button", name="Retire for good?").click()
    row.wait_for(state="detached")
    assert "delta" in admin.page.inner_text(".retired")


def test_model_that_does_not_load_says_why_and_the_others_go_on(admin, engine):
    engine.failures["path:/broken"] = "model_.safetensors_ is <b>not</b> a safetensors file, but `*x*`"
    admin.register(name="broken", source="path:/broken")
    row = admin.model("broken")
    row.locator(".chip.failed").wait_for()
    assert "is <b>not</b> a safetensors file" in row.inner_text()
    said = admin.page.locator("#register-said.bad")
    assert said.inner_text().startswith(f"broken is registered but does not work: {engine.failures['path:/broken']}.")
    assert said.evaluate("said => getComputedStyle(said.querySelector('p')).color") == bad_colour(admin)
    assert admin.model("alpha").locator(".chip.ready").count() == 1
    engine.failures.clear()
    row.get_by_role("button", name="Try broken again").click()
    row.locator(".chip.ready").wait_for()
    row.get_by_role("button", name="Retire broken").click()
    row.get_by_role("button", name="Retire for good?").click()
    row.wait_for(state="detached")


def bad_colour(visit) -> str:
    """What `--bad` is here, as a browser writes it."""
    return visit.page.evaluate(
        "(() => { const probe = document.body.appendChild(document.createElement('i'));"
        " probe.style.color = 'var(--bad)'; return getComputedStyle(probe).color; })()"
    )


def test_form_begins_and_ends_with_the_sampling_of_the_shipped_models(admin):
    def shown() -> dict[str, str]:
        return {name: admin.field(name).input_value() for name in SOUND_SAMPLING}

    assert shown() == {"temperature": "0.3", "top_p": "0.9", "frequency_penalty": "0.5", "max_tokens": "384"}
    admin.register(name="echo", source="path:/echo", temperature="0.7")
    admin.page.wait_for_selector("#register-said.good")
    assert shown()["temperature"] == "0.3"
    admin.website.in_loop(admin.website.services.registry.retire("echo"))


def test_votes_can_be_read_on_a_phone(site, open_site):
    visitor = site.visitor()
    visitor.vote(visitor.battle("Are you alpha?")[0])
    visit = open_site(site, "/admin/login", phone=True).signed_in(ADMIN_PASSWORD).go("/admin")
    rated = visit.page.locator("#admin-votes tbody tr").first.locator("td").last
    assert "not blind" in rated.inner_text()
    assert rated.bounding_box()["width"] > 300
    assert visit.overflow() == 0


def test_suspects_are_looked_for_put_into_quarantine_and_released(site, open_site):
    with site.services.database.session() as session:
        add_voters(session, tuple(model.id for model in queries.models(session))[:2])
    page = open_site(site, "/admin/login", phone=True).signed_in(ADMIN_PASSWORD).go("/admin").page
    assert page.locator("#admin-suspects tbody").count() == 0
    page.wait_for_selector("#admin-said", state="attached")  # the page's script is at work
    page.click("#suspects-look")
    page.locator("#admin-suspects tbody tr", has_text="12 votes within 60 s").wait_for()
    page.click("#admin-suspects button[data-action=quarantine]")
    page.locator("#admin-suspects button[data-action=release]").wait_for()
    with site.services.database.session(read_only=True) as session:
        quarantined = queries.vote_totals(session)[-1]
    assert quarantined == 1
    page.click("#admin-suspects button[data-action=release]")
    page.locator("#admin-suspects button[data-action=quarantine]").wait_for()
