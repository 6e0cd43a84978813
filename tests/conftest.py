"""Shared by all tests: pytest's own plugin tester."""

pytest_plugins = "pytester"
