"""The side panel's routes, on a stand-in for aiohttp: this environment has no ComfyUI."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pack  # noqa: F401  # makes parallel_dit importable
import pytest


class Refused(Exception):
    pass


class Routes:
    """As aiohttp's RouteTableDef: method and path -> handler."""

    def __init__(self):
        self.handlers = {}

    def get(self, path):
        return lambda handler: self.handlers.setdefault(("GET", path), handler)

    def post(self, path):
        return lambda handler: self.handlers.setdefault(("POST", path), handler)


def response(text="", status=200):
    return SimpleNamespace(text=text, status=status)


@pytest.fixture
def module(monkeypatch):
    web = SimpleNamespace(
        Response=response,
        json_response=lambda found, status=200: response(json.dumps(found), status),
        RouteTableDef=Routes,
    )
    if "aiohttp" not in sys.modules:
        monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(web=web))
    from parallel_dit.nodes.panel import routes

    monkeypatch.setattr(routes, "web", web)
    return routes


@pytest.fixture
def ask(module):
    """ask(method, name, body, **headers) -> response."""
    done = []

    def act(body):
        done.append(body)
        if "wrong" in body:
            raise Refused("wrong is 1; set it to 0.")
        return {"did": body}

    def fail():
        raise ZeroDivisionError

    routes = Routes()
    questions = {"status": lambda: {"backends": []}, "log": lambda: "<b>", "fail": fail}
    module.add_routes(routes, questions, {"act": act}, (Refused,))

    def ask(method, name, body="{}", **headers):
        async def parsed():
            return json.loads(body)

        request = SimpleNamespace(
            headers={key.replace("_", "-"): value for key, value in headers.items()}, json=parsed
        )
        return asyncio.run(routes.handlers[method, f"/parallel_dit/{name}"](request))

    ask.done = done
    ask.handlers = routes.handlers
    return ask


def test_questions_are_answered_as_json_or_text(ask):
    assert json.loads(ask("GET", "status").text) == {"backends": []}
    assert ask("GET", "log").text == "<b>"


def test_a_route_can_be_printed(ask):
    """aiohttp's RouteDef takes the name of its handler for that."""
    assert all(handler.__name__ for handler in ask.handlers.values())


def test_a_mistake_is_one_sentence_and_a_bug_is_not_hidden(ask):
    found = ask("POST", "act", '{"wrong": 1}')
    assert (found.status, json.loads(found.text)) == (400, {"error": "wrong is 1; set it to 0."})
    with pytest.raises(ZeroDivisionError):
        ask("GET", "fail")


@pytest.mark.parametrize("body", ["", "[1]", "nothing", "1"])
def test_an_action_takes_an_object(ask, body):
    assert ask("POST", "act", body).status == 400 and not ask.done


@pytest.mark.parametrize(
    "headers, is_own",
    [
        ({}, True),
        ({"Sec_Fetch_Site": "same-origin", "Origin": "http://proxy", "Host": "127.0.0.1:8188"}, True),
        ({"Sec_Fetch_Site": "cross-site"}, False),
        ({"Sec_Fetch_Site": "same-site", "Origin": "http://127.0.0.1:1", "Host": "127.0.0.1:8188"}, False),
        ({"Origin": "http://127.0.0.1:8188", "Host": "127.0.0.1:8188"}, True),
        ({"Origin": "http://127.0.0.1:9", "Host": "127.0.0.1:8188"}, False),
        ({"Origin": "https://elsewhere.example", "Host": "127.0.0.1:8188"}, False),
        ({"Origin": "null", "Host": "127.0.0.1:8188"}, False),
    ],
)
def test_actions_are_for_comfyuis_own_page(ask, headers, is_own):
    assert ask("POST", "act", '{"n": 1}', **headers).status == (200 if is_own else 403)
    assert ask.done == [{"n": 1}] * is_own
