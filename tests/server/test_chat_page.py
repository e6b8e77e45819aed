"""The chat page at /, in a real headless Chromium against a real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    expect,
    sync_playwright,
)

from .conftest import API_KEY, REPO, RunningServer, StartServer
from .test_chat import STORY, running_stream

PAGE = REPO / "edgellm_server" / "chat_page.html"
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",  # Chromium refuses to run as root with one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ANSWER_DEADLINE_MS = 60_000


@dataclass
class Opened:
    """A page of the browser, and what it did since it was opened."""

    page: Page
    requests: list[Request] = field(default_factory=list)
    # Refused requests are not among them: Chromium reports every 4xx and 5xx as an error.
    faults: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: self.faults.append(dialog.message))
        self.page.on("console", self._hear)

    def _hear(self, message: ConsoleMessage) -> None:
        if not message.text.startswith("Failed to load resource"):
            self.faults.append(message.text)

    def ask(self, text: str) -> None:
        self.page.get_by_label("Your message").fill(text)
        self.page.keyboard.press("Enter")

    def wait_for_answers(self, count: int) -> None:
        expect(self.page.locator(".answer[aria-busy=false]")).to_have_count(
            count, timeout=ANSWER_DEADLINE_MS
        )

    def wait_for_first_token(self) -> None:
        expect(self.page.locator(".answer").last.locator(".ttft")).to_contain_text(
            "ms", timeout=ANSWER_DEADLINE_MS
        )

    def figure(self, name: str) -> float:
        text = self.page.locator(f".answer >> nth=-1 >> .{name} b").inner_text()
        return float(re.sub(r"[^0-9.]", "", text))

    def bodies_sent(self) -> list[dict[str, Any]]:
        asked = [r for r in self.requests if r.url.endswith("/v1/chat/completions")]
        return [json.loads(request.post_data or "") for request in asked]


OpenPage = Callable[..., Opened]


# Of this module alone: while Playwright's loop is there, asyncio.run() is refused to other tests.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "these tests need Debian's package chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, headless=True, args=[*CHROMIUM_ARGUMENTS]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """open_page(server, color_scheme="dark", …) -> the page, in a browser without a history.

    It is there when it says that the server is in `state`.
    """
    with contextlib.ExitStack() as contexts:

        def open_page(
            server: RunningServer, state: str = "ready", init_script: str = "", **options: Any
        ) -> Opened:
            context = browser.new_context(**options)
            contexts.callback(context.close)
            if init_script:
                context.add_init_script(init_script)
            opened = Opened(context.new_page())
            opened.listen()
            opened.page.goto(server.url)
            expect(status(opened)).to_have_attribute("data-state", state)
            return opened

        yield open_page


@pytest.fixture
def opened(open_page: OpenPage, server: RunningServer) -> Opened:
    return open_page(server)


def status(opened: Opened) -> Locator:
    return opened.page.locator("#status")


def settings_button(page: Page) -> Locator:
    return page.get_by_role("button", name="Settings", exact=True)


# A model that says what a test wants


class Upstream:
    """An OpenAI-compatible server whose model answers a question with the pieces set for it.

    Between pieces it waits where a piece is an Event, and hangs up where it is None.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[str | threading.Event | None]] = {}
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                body = json.dumps({"object": "list", "data": [{"id": "told"}]}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.close_connection = True
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                question = asked["messages"][-1]["content"]
                with contextlib.suppress(OSError):  # who asked may leave
                    self._stream(upstream.answers.get(question, ["Well."]))

            def _stream(self, pieces: list[str | threading.Event | None]) -> None:
                for piece in pieces:
                    if piece is None:
                        return
                    if isinstance(piece, threading.Event):
                        piece.wait(60)
                        continue
                    self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
                end = {"index": 0, "delta": {}, "finish_reason": "stop"}
                usage = {"prompt_tokens": 9, "completion_tokens": len(pieces), "total_tokens": 0}
                self._event({"choices": [end]})
                self._event({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, data: dict[str, Any]) -> None:
                head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "told"}
                self.wfile.write(b"data: " + json.dumps(head | data).encode() + b"\n\n")
                self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.close()


@pytest.fixture(scope="module")
def telling_server(start_server: StartServer, upstream: Upstream) -> RunningServer:
    server = start_server(
        EDGELLM_ENGINE="forward",
        EDGELLM_UPSTREAM_URL=upstream.url,
        EDGELLM_MODEL_NAME="told",
        EDGELLM_MODEL_PATH=None,
        EDGELLM_N_THREADS=None,
    )
    server.wait_until_ready()
    return server


# What is sent


def test_the_page_is_one_small_file_that_asks_nothing_of_other_hosts(
    opened: Opened, server: RunningServer
) -> None:
    with server.client() as client:
        response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.content == PAGE.read_bytes()
    assert len(response.content) < 50_000
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    opened.ask("Say hello.")
    opened.wait_for_answers(1)
    assert {urlsplit(r.url).path for r in opened.requests if not r.url.startswith("data:")} == {
        "/",
        "/health",
        "/v1/models",
        "/v1/chat/completions",
    }
    assert all(r.url.startswith((f"{server.url}/", "data:")) for r in opened.requests)
    assert opened.faults == []


def test_the_file_holds_to_what_its_policy_allows() -> None:
    """The policy is made of the one style and the one script; nothing else would be let run."""
    text = PAGE.read_text()
    assert len(re.findall(r"<style\b", text)) == text.count("<style>") == 1
    assert len(re.findall(r"<script\b", text)) == text.count("<script>") == 1
    assert not re.search(r"<[^>]*\s(on[a-z]+|style|src)\s*=", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    addresses = set(re.findall(r"https?://[^\s'\"]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address that is asked


def test_without_web_ui_there_is_no_page_and_the_api_is_as_ever(start_server: StartServer) -> None:
    server = start_server(EDGELLM_WEB_UI="0")
    server.wait_until_ready()
    with server.client() as client:
        refused = client.get("/")
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "not_found"
        assert client.get("/v1/models").status_code == 200
    server.stop()


# An answer


def test_an_answer_grows_while_it_is_made_and_ends_with_its_figures(
    opened: Opened, server: RunningServer
) -> None:
    known = {event["id"] for event in server.events("request")}
    page = opened.page
    settings_button(page).click()
    page.get_by_label("Longest answer").fill("60")
    page.get_by_label("Temperature").fill("0")
    page.keyboard.press("Escape")
    began = time.monotonic()
    opened.ask(STORY)
    answer = page.locator(".answer")
    lengths: set[int] = set()
    while answer.get_attribute("aria-busy") == "true":
        lengths.add(
            page.locator(".text:not(:has(.waiting))").evaluate_all(
                "e => e[0]?.innerText.length ?? 0"
            )
        )
    wall_ms = (time.monotonic() - began) * 1000
    assert len(lengths - {0}) >= 3

    logged = server.wait_for_event("request", lambda event: event["id"] not in known)
    assert logged["status"] == 200
    assert opened.figure("tokens") == logged["completion_tokens"] == 60
    expect(page.locator(".tokens")).to_have_text("60 tokens, cut off")
    assert opened.figure("prompt") == logged["prompt_tokens"]
    # The page sees what the server saw, and the way there and back.
    assert logged["ttft_ms"] - 1 <= opened.figure("ttft") <= wall_ms
    decode_s = (logged["duration_ms"] - logged["ttft_ms"]) / 1000
    assert opened.figure("rate") == pytest.approx(59 / decode_s, rel=0.3)
    (body,) = opened.bodies_sent()
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 60, "small")
    assert opened.faults == []


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_ends_the_answer_on_the_server_and_keeps_what_came(
    opened: Opened, server: RunningServer, way: str
) -> None:
    known = {event["id"] for event in server.events("request")}
    page = opened.page
    opened.ask(STORY)
    opened.wait_for_first_token()
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    opened.wait_for_answers(1)
    logged = server.wait_for_event("request", lambda event: event["id"] not in known)
    assert logged["status"] == 499
    assert logged["completion_tokens"] < 400
    expect(page.locator(".tokens")).to_contain_text("stopped")
    said = page.locator(".text").inner_text().strip()
    assert said

    opened.ask("Go on.")
    opened.wait_for_first_token()
    assert [m["role"] for m in opened.bodies_sent()[-1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    page.keyboard.press("Escape")
    opened.wait_for_answers(2)
    assert opened.faults == []


def test_a_double_click_on_send_does_not_stop_what_it_started(
    open_page: OpenPage, telling_server: RunningServer
) -> None:
    opened = open_page(telling_server)
    opened.page.get_by_label("Your message").fill("Hi")
    opened.page.get_by_role("button", name="Send").dblclick()
    opened.wait_for_answers(1)
    expect(opened.page.locator(".text")).to_have_text("Well.")


def test_the_next_question_goes_out_with_the_conversation_and_a_new_chat_without(
    opened: Opened,
) -> None:
    page = opened.page
    settings_button(page).click()
    page.get_by_label("System prompt").fill("Answer in one word.")
    page.get_by_label("Longest answer").fill("5")
    page.keyboard.press("Escape")
    opened.ask("Name a colour.")
    opened.wait_for_answers(1)
    opened.ask("Another one.")
    opened.wait_for_answers(2)
    system, *said = opened.bodies_sent()[-1]["messages"]
    assert system == {"role": "system", "content": "Answer in one word."}
    assert [m["role"] for m in said] == ["user", "assistant", "user"]
    assert (said[0]["content"], said[2]["content"]) == ("Name a colour.", "Another one.")
    assert said[1]["content"].strip() == page.locator(".text").first.inner_text().strip()

    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    opened.ask("Name a bird.")
    opened.wait_for_answers(1)
    assert opened.bodies_sent()[-1]["messages"] == [
        system,
        {"role": "user", "content": "Name a bird."},
    ]


def test_a_setting_that_makes_no_sense_is_told_and_nothing_is_sent(opened: Opened) -> None:
    page = opened.page
    settings_button(page).click()
    page.get_by_label("Temperature").fill("9")
    page.keyboard.press("Escape")
    opened.ask("Hi")
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert opened.bodies_sent() == []
    expect(page.get_by_label("Your message")).to_have_value("Hi")


# Text of the model


OUR_TAGS = {"ARTICLE", "DIV", "SPAN", "P", "H3", "PRE", "CODE", "STRONG", "B", "BUTTON"}
HOSTILE = (
    "<img src=x onerror=\"alert(1)\"><script>document.title='taken'</script>\n\n"
    "`<b>inline</b>` and **<i>bold</i>**\n\n"
    "# <u>heading</u>\n"
    "- <s>item</s>\n\n"
    "```<html>\n</code><iframe src=/health></iframe>\n```\n"
    "[link](javascript:alert(2))"
)


def test_markup_in_an_answer_stays_text(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream
) -> None:
    question = "<img src=x onerror=alert(3)>"
    # In pieces that end within tags, and whole.
    upstream.answers[question] = [HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)]
    opened = open_page(telling_server)
    opened.ask(question)
    opened.wait_for_answers(1)
    page = opened.page
    expect(page.locator(".mine")).to_contain_text(question)
    shown = page.locator(".text").inner_text()
    for text in (
        "<img src=x onerror=\"alert(1)\"><script>document.title='taken'</script>",
        "<b>inline</b>",
        "<i>bold</i>",
        "<u>heading</u>",
        "<s>item</s>",
        "</code><iframe src=/health></iframe>",
        "[link](javascript:alert(2))",
    ):
        assert text in shown
    tags = page.locator("#log *").evaluate_all("all => [...new Set(all.map(e => e.tagName))]")
    assert set(tags) <= OUR_TAGS
    assert page.title().startswith("told")
    assert opened.faults == []


def test_code_lists_and_emphasis_look_like_what_they_are(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream
) -> None:
    text = (
        "### How\n"
        "Two **good** ways, with `ls -l`:\n\n"
        "1. First\n"
        "   ```sh\n   ls -l\n     | sort\n   ```\n"
        "2. Second\n\n"
        "```python\nif a < b:\n\n    print(a * b * c)\n```\n"
        "2 * 3 * 4 and a stray ` and **\n"
        "```\nnever closed"
    )
    upstream.answers["How?"] = list(text)
    opened = open_page(telling_server)
    opened.ask("How?")
    opened.wait_for_answers(1)
    shown = opened.page.locator(".text")
    assert shown.locator("h3").all_inner_texts() == ["How"]
    assert shown.locator("strong").all_inner_texts() == ["good"]
    assert shown.locator("p code").all_inner_texts() == ["ls -l"]
    assert shown.locator(".item").all_inner_texts() == ["1.\nFirst", "2.\nSecond"]
    assert shown.locator("pre code").all_inner_texts() == [
        "ls -l\n  | sort",
        "if a < b:\n\n    print(a * b * c)",
        "never closed",
    ]
    assert shown.locator("pre").evaluate_all("all => all.map(e => e.dataset.language)") == [
        "sh",
        "python",
        None,
    ]
    expect(shown.locator("p").last).to_have_text("2 * 3 * 4 and a stray ` and **")


@pytest.mark.parametrize("clipboard", ["given", "withheld"])
def test_copy_gives_the_answer_as_the_model_wrote_it(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream, clipboard: str
) -> None:
    """Withheld: as on a plain http:// page of another host, which most edge boxes are."""
    # The clipboard outlives a page: each case has a text of its own.
    upstream.answers["List"] = ["- **one**\n", f"- `{clipboard}`"]
    withhold = "Object.defineProperty(Navigator.prototype, 'clipboard', {value: undefined})"
    opened = open_page(
        telling_server,
        init_script=withhold if clipboard == "withheld" else "",
        permissions=["clipboard-read", "clipboard-write"],
    )
    opened.ask("List")
    opened.wait_for_answers(1)
    page = opened.page
    page.get_by_role("button", name="Copy answer").click()
    expect(page.locator(".copy")).to_have_text("Copied")
    page.get_by_label("Your message").focus()
    page.keyboard.press("Control+V")
    expect(page.get_by_label("Your message")).to_have_value(f"- **one**\n- `{clipboard}`")


def test_the_page_follows_the_answer_until_the_reader_scrolls_up(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream
) -> None:
    more, rest = threading.Event(), threading.Event()
    lines = [f"Line {number}.\n\n" for number in range(40)]
    upstream.answers["Long"] = [*lines, more, *lines, rest, "The end."]
    opened = open_page(telling_server, viewport={"width": 800, "height": 500})
    opened.ask("Long")
    page = opened.page
    scroller = page.locator("#scroller")
    to_end = "e => e.scrollHeight - e.clientHeight - e.scrollTop"
    expect(page.locator(".text p")).to_have_count(40)
    assert scroller.evaluate(to_end) < 2

    scroller.hover()
    page.mouse.wheel(0, -300)
    latest = page.get_by_role("button", name="Latest")
    expect(latest).to_be_visible()
    top = scroller.evaluate("e => e.scrollTop")
    more.set()
    expect(page.locator(".text p")).to_have_count(80)
    assert scroller.evaluate("e => e.scrollTop") == top

    latest.click()
    expect(latest).to_be_hidden()
    rest.set()
    opened.wait_for_answers(1)
    assert scroller.evaluate(to_end) < 2


def test_nothing_around_the_answer_moves_while_it_comes(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream
) -> None:
    gate, end = threading.Event(), threading.Event()
    upstream.answers["Calm"] = [gate, "One ", "two ", "three.", end]
    opened = open_page(telling_server)
    page = opened.page
    page.get_by_label("Your message").fill("Calm")

    def places(*selectors: str) -> list[Any]:
        return [page.locator(selector).bounding_box() for selector in selectors]

    around = ("header", "#composer", "#go", "#hint")
    before = places(*around)
    page.keyboard.press("Enter")
    expect(page.locator(".waiting")).to_be_visible()
    of_answer = (".mine", ".text", ".foot")
    waiting = places(*of_answer)
    gate.set()
    expect(page.locator(".text")).to_have_text("One two three.")
    streaming = places(*of_answer)
    end.set()
    opened.wait_for_answers(1)
    assert waiting == streaming == places(*of_answer)
    assert places(*around) == before


# When something is wrong


def test_a_server_with_keys_is_asked_with_the_key_that_is_entered(
    open_page: OpenPage, keyed_server: RunningServer
) -> None:
    opened = open_page(keyed_server, state="key")
    page = opened.page
    field = page.get_by_label("This server asks for an API key")
    expect(field).to_be_focused()
    expect(status(opened)).to_contain_text("API key needed")
    for wrong in ("not-the-key", "schlüssel"):
        field.fill(wrong)
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_have_text("The server did not accept this key.")
        expect(field).to_be_focused()

    field.fill(API_KEY)
    page.get_by_role("button", name="Use key").click()
    expect(field).to_be_hidden()
    expect(status(opened)).to_have_attribute("data-state", "ready")
    opened.ask("What is rain?")
    opened.wait_for_answers(1)
    expect(page.locator(".ttft")).to_contain_text("ms")
    assert not any(API_KEY in request.url for request in opened.requests)
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

    page.reload()
    expect(status(opened)).to_have_attribute("data-state", "ready")
    other_tab = page.context.new_page()
    other_tab.goto(keyed_server.url)
    expect(other_tab.locator("#key-form")).to_be_visible()

    settings_button(page).click()
    page.get_by_role("button", name="Forget key").click()
    expect(field).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('edgellm.key')") is None
    assert opened.faults == []


def test_an_overloaded_server_is_told_kindly_and_asked_again_by_a_button(
    open_page: OpenPage, start_server: StartServer
) -> None:
    server = start_server(EDGELLM_MAX_QUEUE="0", EDGELLM_MAX_TOKENS="400")
    server.wait_until_ready()
    opened = open_page(server)
    trouble = opened.page.locator(".trouble")
    with running_stream(server) as held:
        opened.ask("Say hello.")
        expect(trouble).to_contain_text("The server is busy with other answers")
        expect(trouble).to_contain_text(re.compile(r"trying again in \d+ s"))
    server.wait_for_event("request", lambda event: event["id"] == held)
    trouble.get_by_role("button", name="Try again").click()
    expect(opened.page.locator(".ttft")).to_contain_text("ms", timeout=ANSWER_DEADLINE_MS)
    expect(trouble).to_have_count(0)
    assert len(opened.bodies_sent()) == 2
    assert opened.faults == []
    server.stop()


def test_an_answer_that_breaks_off_keeps_its_text_and_can_be_asked_again(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream
) -> None:
    upstream.answers["Fragile"] = ["So far ", "so good", None]
    opened = open_page(telling_server)
    opened.ask("Fragile")
    page = opened.page
    trouble = page.locator(".trouble")
    expect(trouble).to_contain_text("The answer broke off")
    expect(trouble).to_contain_text("Request chatcmpl-")
    expect(page.locator(".text")).to_have_text("So far so good")

    upstream.answers["Fragile"] = ["All of it."]
    trouble.get_by_role("button", name="Try again").click()
    expect(page.locator(".text")).to_have_text("All of it.")
    expect(trouble).to_have_count(0)
    assert len(opened.bodies_sent()[-1]["messages"]) == 1
    assert opened.faults == []


def test_a_conversation_over_the_context_is_told_with_both_numbers(
    open_page: OpenPage, keyed_server: RunningServer
) -> None:
    opened = open_page(
        keyed_server, init_script=f"sessionStorage.setItem('edgellm.key', '{API_KEY}')"
    )
    question = "word " * 700
    opened.ask(question)
    trouble = opened.page.locator(".trouble")
    expect(trouble).to_contain_text(re.compile(r"The prompt is \d+ tokens long, .* 512 tokens"))
    trouble.get_by_role("button", name="New chat").click()
    expect(opened.page.get_by_label("Your message")).to_have_value(question.strip())


def test_a_loading_model_a_failed_one_and_a_server_that_left_are_told_apart(
    open_page: OpenPage, start_server: StartServer, tmp_path: Path
) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    server = start_server(EDGELLM_MODEL_PATH=str(pipe))
    server.wait_until_open()
    opened = open_page(server, state="loading")
    page = opened.page
    expect(status(opened)).to_have_text("Loading the model…")
    opened.ask("Is anyone there?")
    expect(page.get_by_label("Your message")).to_have_value("Is anyone there?")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()

    pipe.write_bytes(b"<!DOCTYPE html>")
    expect(status(opened)).to_have_text("The model did not load", timeout=10_000)
    expect(page.locator("#empty")).to_contain_text("want a GGUF model")
    expect(status(opened)).to_have_text("Not reachable", timeout=15_000)
    assert opened.bodies_sent() == []
    assert opened.faults == []


def test_sending_opens_by_itself_when_the_server_is_back(
    open_page: OpenPage, start_server: StartServer
) -> None:
    """A host that goes and comes back with another model: the page is never loaded anew."""
    server = start_server()
    server.wait_until_ready()
    opened = open_page(server)
    server.stop()
    page = opened.page
    # Looked at again, a page asks at once.
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(status(opened)).to_have_text("Not reachable")
    page.get_by_label("Your message").fill("Hi")
    send = page.get_by_role("button", name="Send")
    expect(send).to_be_disabled()

    again = start_server(EDGELLM_PORT=str(server.port), EDGELLM_MODEL_NAME="another")
    expect(send).to_be_enabled(timeout=30_000)
    expect(page.get_by_role("heading", level=1)).to_have_text("another")
    page.keyboard.press("Enter")
    opened.wait_for_answers(1)
    assert opened.bodies_sent()[-1]["model"] == "another"
    again.stop()


def test_a_server_that_leaves_during_an_answer_is_told_and_the_text_stays(
    open_page: OpenPage, start_server: StartServer
) -> None:
    server = start_server(EDGELLM_MAX_TOKENS="1500")
    server.wait_until_ready()
    opened = open_page(server)
    opened.ask(STORY)
    opened.wait_for_first_token()
    server.process.kill()
    expect(opened.page.locator(".trouble")).to_contain_text("The answer broke off")
    assert opened.page.locator(".text").inner_text().strip()


# For everyone


CONTRAST = """selector => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const element = document.querySelector(selector);
  let behind = element, back;
  do {
    back = numbers(getComputedStyle(behind).backgroundColor);
    behind = behind.parentElement;
  } while (back.length === 4 && back[3] === 0);
  const [a, b] = [light(numbers(getComputedStyle(element).color)), light(back)];
  return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), light(back)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_browser_and_are_readable(
    open_page: OpenPage, telling_server: RunningServer, scheme: str
) -> None:
    opened = open_page(telling_server, color_scheme=scheme)
    opened.ask("Hi")
    opened.wait_for_answers(1)
    for selector in ("#model", "#status", ".mine", ".text", ".foot", ".ttft b", ".copy", ".hint"):
        contrast, back = opened.page.evaluate(CONTRAST, selector)
        assert contrast >= 4.5, selector  # WCAG 2.2, 1.4.3
        assert (back > 0.7) if scheme == "light" else (back < 0.1), selector


def test_a_phone_sees_the_whole_page_without_scrolling_sideways(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream
) -> None:
    wide = "```\n" + "x" * 300 + "\n```\n" + "y" * 300
    upstream.answers["Wide " + "z" * 200] = [wide]
    opened = open_page(
        telling_server,
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
        device_scale_factor=2,
    )
    opened.ask("Wide " + "z" * 200)
    opened.wait_for_answers(1)
    page = opened.page
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert page.locator("#scroller").evaluate("e => e.scrollWidth <= e.clientWidth")
    for name in ("New chat", "Settings", "Send"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert min(box["width"], box["height"]) >= 36
    settings_button(page).tap()
    panel = page.locator("#settings").bounding_box()
    assert panel is not None
    assert panel["x"] >= 0
    assert panel["x"] + panel["width"] <= 390


def test_the_keyboard_is_enough(
    open_page: OpenPage, telling_server: RunningServer, upstream: Upstream
) -> None:
    upstream.answers["one\ntwo"] = ["Both."]
    opened = open_page(telling_server)
    page = opened.page
    message = page.get_by_label("Your message")
    expect(message).to_be_focused()
    for key in ("o", "n", "e", "Shift+Enter", "t", "w", "o"):
        page.keyboard.press(key)
    expect(message).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    opened.wait_for_answers(1)
    expect(page.locator(".text")).to_have_text("Both.")
    expect(message).to_be_focused()
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")

    seen = []
    for _ in range(6):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.ariaLabel"))
    assert {"New chat", "Settings", "Conversation", "Copy answer"} <= set(seen)
    settings_button(page).press("Enter")
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.keyboard.press("Escape")
    expect(settings_button(page)).to_be_focused()
