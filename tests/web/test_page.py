"""The files of the page at `/`, read as text: they fit each other, and ask for nothing that no server has."""

from __future__ import annotations

import re
from functools import cache

import pytest

from moestro.gateway.clients.paths import Routes
from moestro.server.api.routes import API_PATHS
from moestro.web.page import PAGE_HEADERS, PAGE_PATHS, page_file

SCRIPTS = sorted(path for path in PAGE_PATHS if path.endswith(".js"))
# Paths of the operators' port that the page uses.
ADMIN = {"admin/engines", "admin/engines/", "admin/decisions"}


@cache
def text(path: str) -> str:
    return page_file(path, "route", "operators").body.decode()


def test_the_page_says_where_it_comes_from():
    page = text("/")
    assert 'data-program="route" data-plane="operators"' in page
    assert "{{" not in page


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_each_file_loads_its_own_server_alone(path):
    hosts = set(re.findall(r"""["'(](?:https?:)?//[\w.]+""", text(path)))
    assert {host[1:] for host in hosts} <= {"http://www.w3.org"}, "the name of SVG"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text(path))
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=[\"']", text(path)), "the policy does not allow it"


def test_all_that_the_files_load_exists():
    assert set(re.findall(r'(?:href|src)="(page/[^"]+)"', text("/"))) <= {path[1:] for path in PAGE_PATHS}
    imported = {f"/page/{name}" for path in SCRIPTS for name in re.findall(r'from "\./([\w.]+)"', text(path))}
    assert imported | {"/page/page.js"} == set(SCRIPTS)


def test_the_scripts_use_elements_that_exist():
    ids = set(re.findall(r'\bid="([\w-]+)"', text("/")))
    used = {name for path in SCRIPTS for name in re.findall(r'byId\("([\w-]+)"\)', text(path))}
    assert used <= ids, used - ids


def test_the_scripts_ask_only_for_paths_that_servers_have():
    fields = {name for path in SCRIPTS for name in re.findall(r'(?:\bread|\bask)\(["`]([\w/]+)', text(path))}
    fields |= {name for path in SCRIPTS for name in re.findall(r'"(v1/[\w/]+)"', text(path))}
    assert {"statistics", "v1/models", "v1/chat/completions", "v1/completions"} <= fields
    served, routed = {each.path for each in API_PATHS}, Routes()
    for path in fields - ADMIN:
        assert f"/{path}" in served
        assert routed.find(f"/{path}") is not None
    assert fields & ADMIN == ADMIN


def test_the_policy_allows_nothing_from_elsewhere():
    policy = dict(part.strip().split(" ", 1) for part in PAGE_HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "connect-src", "img-src"):
        assert policy[kind] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in PAGE_HEADERS["Content-Security-Policy"]
