"""Fixtures that several folders of tests share."""

pytest_plugins = ["tests.databases"]
