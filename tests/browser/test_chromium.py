"""The browser that the tests drive is found, or it is said what to do."""

from __future__ import annotations

import pytest

from tests.browser import chromium


@pytest.mark.parametrize(
    ("script", "mode", "said"),
    [
        ("#!/bin/sh\necho libnss3.so: cannot open >&2; exit 127", 0o755, "libnss3.so: cannot open"),
        ("#!/bin/sh\nexit 3", 0o755, "exit status 3"),
        ("#!/bin/sh", 0o644, "Permission denied"),
    ],
)
def test_a_browser_that_does_not_run_is_told_of_before_any_test(script, mode, said, tmp_path, monkeypatch, capsys):
    browser = tmp_path / "chromium"
    browser.write_text(script)
    browser.chmod(mode)
    monkeypatch.setenv("ARENA_CHROMIUM", str(browser))
    assert chromium.main() == 1
    told = capsys.readouterr().err
    assert said in told and "apt-get install chromium" in told
