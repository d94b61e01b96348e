"""The page at `/`: what it asks for and what it shows, the latter in a real browser.

The browser's tests need Chromium (Debian's package will do) and playwright's Python package, and are skipped without.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from scripted_model import ScriptedModel
from server_rig import NAME, PROMPT, USER, ServerRig, says, serving, starting, tokenizer

PAGE = files("cb_engine.serve").joinpath("page.html").read_text(encoding="utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
QUESTION = USER[0]["content"]


class LateLoad:
    """Loads a model once it may."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __call__(self) -> tuple[Any, Any]:
        self.go_on.wait(30)
        return says("Yes."), tokenizer()


# ---- what is served --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    with serving() as made:
        yield made


def test_the_page_may_load_nothing_from_elsewhere(rig: ServerRig):
    answer = rig.get("/")
    assert answer.text == PAGE
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe-eval" not in policy["script-src"]


def test_the_page_names_nothing_from_elsewhere():
    assert not re.search(r"https?:|[\"'=]//|@import|url\(", PAGE)
    assert set(re.findall(r"""(?:src|href)=["']?([^"'>]*)""", PAGE)) == {"data:,"}
    paths = re.findall(r"""(?:fetch|post)\("([^"]*)\"""", SCRIPT)
    assert paths == ["status", "v1/chat/completions", "v1/completions"]


def test_the_page_writes_text_and_no_html():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\b|Function\(", SCRIPT)


def test_the_script_reads_the_fields_that_are_served_and_all_of_them(rig: ServerRig):
    status = rig.get("/status").json()
    # `status` by itself: not the status of a response or of an error.
    assert set(re.findall(r"(?<![\w.])status\??\.(\w+)", SCRIPT)) == set(status)
    assert set(re.findall(r"\bstats\.(\w+)", SCRIPT)) == set(status["stats"])
    assert (status["model"], status["state"], status["reason"], status["restarts"]) == (NAME, "ready", None, 0)


def test_the_figures_are_the_engines(rig: ServerRig):
    before = rig.get("/status").json()["stats"]
    rig.post("/v1/chat/completions", {"messages": USER, "max_tokens": 5, "temperature": 0})
    rig.wait_until_idle()
    after = rig.get("/status").json()["stats"]
    stats = rig.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT)
    assert after["generated_tokens"] - before["generated_tokens"] == 5
    assert after["num_steps"] > before["num_steps"]
    assert after["kv_live"] == 0
    assert after["kv_cached"] == stats.cached_blocks / (stats.cached_blocks + stats.free_blocks) > 0


def test_there_are_no_figures_before_the_model_is_there():
    load = LateLoad()
    with starting(load) as rig:
        status = rig.get("/status").json()
        assert (status["state"], status["reason"]) == ("loading", "the model is being loaded")
        assert status["stats"] is None
        load.go_on.set()
        rig.wait_until(lambda: rig.get("/status").json()["stats"] is not None)


def test_the_page_knows_a_missing_chat_template_by_the_servers_words():
    (words,) = re.findall(r'error\.message\.includes\("([^"]+)"\)', SCRIPT)
    with serving(template=None) as rig:
        refusal = rig.post("/v1/chat/completions", {"messages": USER})
    assert refusal.status_code == 400
    assert words in refusal.json()["error"]["message"]


# ---- in a browser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the browser is driven by the package playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium and no google-chrome on the PATH")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


class Visit:
    """The page in a browser, and what a reader of it sees."""

    def __init__(self, tab: Any, url: str) -> None:
        self.tab = tab
        self.faults: list[str] = []
        tab.on("pageerror", lambda error: self.faults.append(str(error)))
        tab.set_default_timeout(20_000)
        tab.goto(url)

    def text(self, name: str) -> str:
        return str(self.tab.locator(f"#{name}").text_content())

    def wait(self, name: str, text: str) -> None:
        """Until an element says exactly this."""
        self.until(lambda: self.text(name) == text, lambda: f"#{name} says {self.text(name)!r}, not {text!r}")

    def until(self, condition: Any, complaint: Any = lambda: "it never came about") -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, complaint()
            self.tab.wait_for_timeout(20)

    def ask(self, prompt: str = QUESTION, **fields: str) -> None:
        for name, value in {"prompt": prompt, "temperature": "0", **fields}.items():
            self.tab.fill(f"[name={name}]", value)
        self.tab.press("[name=prompt]", "Control+Enter")

    def num_points(self, title: str) -> list[int]:
        """Points in the lines of a plot."""
        lines = self.tab.locator("figure", has_text=title).locator(".line").all()
        return [len(re.findall(r"[\d.]+,[\d.]+", line.get_attribute("d") or "")) for line in lines]


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Opens the page of a server; in the end nothing may have gone wrong in its script."""
    visits: list[Visit] = []

    def open_page(rig: ServerRig, **context: Any) -> Visit:
        visits.append(Visit(browser.new_context(**context).new_page(), rig.url))
        return visits[-1]

    yield open_page
    for made in visits:
        made.tab.context.close()
    assert [fault for made in visits for fault in made.faults] == []


def says_slowly(text: str, seconds: float = 0.02, **options: Any) -> ScriptedModel:
    model = says(text, **options)

    def wait(positions: Any, logits: Any) -> Any:
        time.sleep(seconds)
        return logits

    model.hook.append(wait)
    return model


@pytest.mark.slow
def test_an_answer_streams_in_and_the_plots_go_along(visit: Any):
    text = "Grüße, 世界! 🙂\n\n  1. one <b>&amp;</b> two. " * 4
    with serving(says_slowly(text)) as rig:
        page = visit(rig)
        page.wait("word", "ready")
        page.ask(max_tokens="400")
        page.until(lambda: 0 < len(page.text("content")) < len(text), lambda: "it does not stream")
        assert page.tab.locator("#send").is_disabled()
        page.wait("content", text)
        page.wait("ending", "stop")
        assert int(page.text("count")) == len(text.encode()) + 1, "the end is a token as well"
        assert page.text("prompted") == f"{len(PROMPT)} (0 cached)"
        assert 0 < float(page.text("speed")) <= 50, "a token takes 20 ms at the least"
        assert page.text("error") == page.text("note") == ""
        page.wait("generated_tokens", str(len(text.encode()) + 1))
        assert (page.text("model"), page.text("restarts"), page.text("weight_version")) == (NAME, "0", "0")
        page.until(lambda: page.num_points("Requests")[0] > 3)
        for title, num_lines in {"Requests": 2, "KV cache": 2, "Generated tokens": 1, "Step time": 1}.items():
            points = page.num_points(title)
            assert all(count > 0 for count in points[:num_lines]), title
        assert page.tab.locator("figure", has_text="Accepted tokens").is_hidden(), "there are no drafts"


@pytest.mark.slow
def test_stop_aborts(visit: Any):
    with serving(says_slowly("word " * 90)) as rig:
        page = visit(rig)
        page.ask(max_tokens="450")
        page.until(lambda: page.text("content").startswith("word "))
        assert rig.stats().num_running == 1
        page.tab.click("#stop")
        rig.wait_until_idle()
        page.wait("note", "Stopped.")
        assert page.text("error") == ""
        assert rig.stats().generated_tokens < 450
        page.until(lambda: page.tab.locator("#send").is_enabled())
        page.until(lambda: page.tab.locator("figure", has_text="Requests").locator("b").first.text_content() == "0")


MARKUP = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.mark.slow
def test_markup_in_an_answer_is_text(visit: Any):
    with serving(says(MARKUP)) as rig:
        page = visit(rig)
        page.ask()
        page.wait("content", MARKUP)
        assert page.tab.locator("#answer :is(script, img)").count() == 0


@pytest.mark.slow
def test_markup_in_one_piece_is_text_wherever_it_comes_from(visit: Any, rig: ServerRig):
    page = visit(rig)
    page.wait("word", "ready")
    status = {**rig.get("/status").json(), "model": MARKUP, "state": MARKUP, "reason": MARKUP}
    page.tab.route("**/status", lambda route: route.fulfill(json=status))
    delta = {"content": MARKUP, "reasoning_content": MARKUP}
    events = [{"choices": [{"delta": delta, "finish_reason": MARKUP}]}, {"error": {"message": MARKUP}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.tab.route("**/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.ask()
    for place in ("content", "reasoning", "ending", "error", "model", "word", "reason"):
        page.wait(place, MARKUP)
    assert page.tab.locator("#answer :is(script, img), header :is(script, img)").count() == 0


@pytest.mark.slow
def test_reasoning_and_the_system_prompt(visit: Any):
    prompt = f"<system>Think.\n<user>{QUESTION}\n<assistant>"
    with serving(says("<think>Hmm, hmm.</think>Yes.", prompt), reasoning="on") as rig:
        page = visit(rig)
        page.ask(system="Think.")
        page.wait("content", "Yes.")
        page.wait("reasoning", "Hmm, hmm.")


@pytest.mark.slow
def test_without_a_chat_template_the_prompt_goes_on(visit: Any):
    with serving(says(" and on", QUESTION), template=None) as rig:
        page = visit(rig)
        page.ask(system="Be brief.")
        page.wait("content", " and on")
        note = "The model has no chat template: this continues the prompt, without the system prompt."
        assert (page.text("note"), page.text("error")) == (note, "")


@pytest.mark.slow
def test_refusals_are_shown(visit: Any):
    with serving() as rig:
        page = visit(rig)
        page.ask("long " * 200)
        page.until(lambda: page.text("error").startswith("400: "), lambda: f"no refusal: {page.text('error')!r}")
        assert page.text("content") == ""
        page.ask(max_tokens="3")  # and go again
        page.wait("count", "3")
        assert page.text("error") == ""


@pytest.mark.slow
def test_the_key_is_asked_for_once(visit: Any):
    with serving(says("Yes."), api_key="secret") as rig:
        page = visit(rig, http_credentials={"username": "", "password": "secret"})
        page.wait("word", "ready")
        page.ask()
        page.wait("content", "Yes.")
    with serving() as rig:
        page = visit(rig)
        refusal = {"status": 401, "body": json.dumps({"error": {"message": "the API key is missing or wrong"}})}
        asked = itertools.count()
        page.tab.route("**/status", lambda route: (next(asked), route.fulfill(**refusal)))
        page.wait("word", "refused")
        assert page.text("reason") == "401: the API key is missing or wrong; reload the page to enter it"
        page.tab.wait_for_timeout(1500)
        assert next(asked) == 1, "it asks again and again"


@pytest.mark.slow
def test_a_failing_engine_is_told(visit: Any, monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    with serving(says_slowly("word " * 90), engine_restarts=1) as rig:
        page = visit(rig)
        page.wait("word", "ready")
        init = rig.context.host.model.init_continuous_batching

        def init_late(**config: Any) -> Any:
            go_on.wait(30)
            return init(**config)

        monkeypatch.setattr(rig.context.host.model, "init_continuous_batching", init_late)
        page.ask(max_tokens="400")
        page.until(lambda: page.text("content").startswith("word"))
        fail_once(rig, monkeypatch)
        page.wait("word", "restarting")
        page.wait("error", "the engine failed while it computed this request; nothing is wrong with the request")
        go_on.set()
        page.wait("word", "ready")
        page.wait("restarts", "1")
        page.ask(max_tokens="400")
        page.until(lambda: page.text("content").startswith("word"))
        assert page.text("error") == ""
        fail_once(rig, monkeypatch)
        page.wait("word", "dead")
        page.wait("reason", "the engine is dead")
        assert page.tab.locator("#state").get_attribute("data-look") == "bad"


def fail_once(rig: ServerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step of the engine of now raises."""

    def step() -> Any:
        raise RuntimeError("a fault on purpose")

    assert rig.context.host.manager is not None
    monkeypatch.setattr(rig.context.host.manager.engine, "step", step)


@pytest.mark.slow
def test_a_server_that_loads_drains_and_goes_away(visit: Any):
    load = LateLoad()
    with starting(load) as rig:
        page = visit(rig)
        page.wait("word", "loading")
        page.ask()
        page.wait("error", "503: the model is being loaded")
        load.go_on.set()
        page.wait("word", "ready")
        rig.context.host.begin_drain()
        page.wait("word", "draining")
    page.wait("word", "unreachable")
    page.ask()
    page.wait("error", "the connection to the server is lost")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_may_be_cut_anywhere(visit: Any, rig: ServerRig, size: int):
    sent = ': a comment\r\ndata: {"a":"ü🙂"}\r\n\r\nevent: x\ndata:first\ndata:  second\n\n\ndata: [DONE]\n\ndata: cut'
    read = """async ([bytes, size]) => {
        const stream = new ReadableStream({ start(controller) {
            for (let i = 0; i < bytes.length; i += size) controller.enqueue(new Uint8Array(bytes.slice(i, i + size)));
            controller.close();
        } });
        const events = [];
        for await (const data of eventsOf(stream)) events.push(data);
        return events;
    }"""
    page = visit(rig)
    assert page.tab.evaluate(read, [list(sent.encode()), size]) == ['{"a":"ü🙂"}', "first\n second", "[DONE]"]


@pytest.mark.slow
def test_rates_acceptance_and_gaps(visit: Any, rig: ServerRig):
    page = visit(rig)
    page.wait("word", "ready")
    fields = rig.get("/status").json()["stats"]
    before = {**fields, "num_steps": 10, "generated_tokens": 100, "num_drafts": 4, "num_accepted_tokens": 9}
    after = {**before, "num_steps": 12, "generated_tokens": 150, "num_drafts": 8, "num_accepted_tokens": 15}
    measure = "([time, stats, before]) => { latest = before; return measure(time, stats); }"
    sample = page.tab.evaluate(measure, [12, {**after, "step_time_ms": 3.5}, {"time": 10, "stats": before}])
    assert (sample["tokens"], sample["accepted"], sample["step"]) == (25, 1.5, 3.5)
    idle = page.tab.evaluate(measure, [12, before, {"time": 10, "stats": before}])
    assert (idle["tokens"], idle["accepted"], idle["step"]) == (0, None, None)
    anew = page.tab.evaluate(measure, [12, {**after, "num_steps": 1}, {"time": 10, "stats": before}])
    assert (anew["tokens"], anew["accepted"], anew["step"]) == (None, None, None)
    assert page.tab.evaluate(measure, [12, None, {"time": 10, "stats": before}]) == {"time": 12}


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 600, 1280])
def test_nothing_is_wider_than_the_screen_and_all_is_labelled(visit: Any, rig: ServerRig, width: int):
    page = visit(rig, viewport={"width": width, "height": 800})
    page.wait("word", "ready")
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    for control in page.tab.locator("input, textarea, button").all():
        name = control.evaluate("node => node.labels?.[0]?.textContent ?? node.textContent")
        assert name.strip(), control
