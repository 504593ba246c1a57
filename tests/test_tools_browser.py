# SPDX-License-Identifier: Apache-2.0
"""Where the tests' browser comes from."""

import os
import subprocess

import pytest

from tools import browser


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """An empty PATH; commands that would be run are noted, and find what a test lets them."""
    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, 100, "first\nE: no such package\n")

    monkeypatch.delenv(browser.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(browser.subprocess, "run", run)
    return ran


def program(path):
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_one_on_the_path_is_taken_and_nothing_is_installed(nothing, tmp_path):
    chrome = program(tmp_path / "google-chrome")
    assert browser.ensure() == chrome
    shell = program(tmp_path / "chromium-headless-shell")
    assert browser.ensure() == shell
    assert nothing == []


def test_the_variable_decides(nothing, tmp_path, monkeypatch):
    program(tmp_path / "chromium")
    other = program(tmp_path / "other")
    monkeypatch.setenv(browser.VARIABLE, other)
    assert browser.ensure() == other
    monkeypatch.setenv(browser.VARIABLE, "off")
    with pytest.raises(browser.BrowserError, match="MIMO_CHROMIUM is off"):
        browser.ensure()
    monkeypatch.setenv(browser.VARIABLE, "/no/such")
    with pytest.raises(browser.BrowserError, match="found '/no/such'.*fix: unset MIMO_CHROMIUM"):
        browser.ensure()
    assert nothing == []


def test_without_root_or_apt_it_says_how_to_get_one(nothing, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(browser.BrowserError, match="install chromium-headless-shell or chromium"):
        browser.ensure()
    program(tmp_path / "apt-get")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(browser.BrowserError, match="no browser on PATH"):
        browser.ensure()
    assert nothing == []


def test_root_gets_the_package(nothing, tmp_path, monkeypatch):
    program(tmp_path / "apt-get")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(browser.BrowserError, match="status 100: E: no such package"):
        browser.ensure()
    assert [command[-1] for command in nothing] == ["update", browser.PACKAGE]
    # As if it had been installed this time.
    monkeypatch.setattr(browser, "_install", lambda: program(tmp_path / "chromium-headless-shell"))
    assert browser.ensure() == str(tmp_path / "chromium-headless-shell")
