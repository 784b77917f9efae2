"""What a visitor does on a page, in the words of the tests."""

from __future__ import annotations

from playwright.sync_api import Locator, Page

from tests.app.running import Website
from tests.waiting import until

QUESTION = "Why is the sky blue?"
VOTES = {"a": "#vote-a", "b": "#vote-b", "tie": "#vote-tie", "both_bad": "#vote-bad"}


class Visit:
    def __init__(self, page: Page, website: Website):
        self.page = page
        self.website = website

    def go(self, path: str = "/") -> Visit:
        self.page.goto(self.website.url + path)
        return self.drawn()

    def drawn(self) -> Visit:
        """Until the page has become what it is going to be."""
        self.page.wait_for_selector("html[data-drawn]")
        if self.page.locator("html[data-view=arena]").count():
            self.page.wait_for_selector("html[data-battle]")
        return self

    # Arena

    @property
    def question(self) -> Locator:
        return self.page.locator("#prompt textarea")

    @property
    def state(self) -> str:
        return self.page.evaluate("document.documentElement.dataset.battle")

    def until(self, *states: str) -> Visit:
        self.page.wait_for_selector(", ".join(f"html[data-battle={state}]" for state in states))
        return self

    def eventually(self, expression: str, *, seconds: float = 30) -> Visit:
        """Until a JavaScript expression is true. (Playwright's own wait would need eval, which the page forbids.)"""
        until(lambda: self.page.evaluate(expression), seconds=seconds)
        return self

    def ask(self, question: str = QUESTION, *, until: str | None = "votable") -> Visit:
        self.question.fill(question)
        self.question.press("Enter")
        return self.until(until) if until else self

    def vote(self, kind: str = "a") -> Visit:
        self.page.click(VOTES[kind])
        return self.until("voted")

    def answer(self, side: str) -> str:
        """The text shown of the last answer of a side."""
        return self.page.locator(f"#chat-{side} .blocks").last.inner_text()

    def battle(self) -> str:
        """The id of the battle that this browser would find again."""
        return self.page.request.get(f"{self.website.url}/api/battles/current").json()["battle"]

    # Admin

    def sign_in(self, password: str) -> Visit:
        self.page.fill("#admin-password", password)
        self.page.press("#admin-password", "Enter")
        self.page.wait_for_selector("#register-send")
        return self.drawn()

    def signed_in(self, password: str) -> Visit:
        """The same without the form."""
        self.page.request.post(f"{self.website.url}/api/admin/login", data={"password": password})
        return self

    def field(self, name: str) -> Locator:
        return self.page.locator(f"#field-{name}").locator("input, textarea")

    def register(self, **fields: str) -> Visit:
        for name, text in fields.items():
            self.field(name).fill(text)
        self.page.click("#register-send")
        return self

    def model(self, name: str) -> Locator:
        return self.page.locator(f'#admin-models tr[data-model="{name}"]')

    # Everywhere

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def nameless_controls(self) -> list[str]:
        """The controls on the page that assistive technology would have no name for."""
        return self.page.evaluate(NAMELESS)


NAMELESS = """() => {
  const controls = document.querySelectorAll("button, a[href], input, textarea, select, [role=button], [tabindex='0']");
  const textOf = (elements) => [...elements].map((element) => element?.textContent ?? "").join("");
  return [...controls].filter((control) => {
    if (!control.checkVisibility() || control.type === "hidden") return false;
    const ids = (control.getAttribute("aria-labelledby") ?? "").split(" ").filter(Boolean);
    const named = textOf(ids.map((id) => document.getElementById(id))) + textOf(control.labels ?? []);
    return ![control.getAttribute("aria-label"), named, control.innerText, control.title].join("").trim();
  }).map((control) => control.outerHTML.slice(0, 160));
}"""
