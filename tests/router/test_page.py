# SPDX-License-Identifier: Apache-2.0
"""The router's page, in a real Chromium."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
from playwright.sync_api import expect

from mimo_plugin.core.targets import Decision
from mimo_plugin.router.page import CONTENT_SECURITY_POLICY, HEADERS, page_files
from tests.router.page_server import PageServer, candidate, decision, example, target, worker

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
NEXT_MS = 8000
"""A round of questions comes every two seconds; the rest is room for a busy machine."""
HOSTILE = '<img src=x onerror="window.hostile = 1"><script>window.hostile = 1</script>'
# Text whose contrast with what is behind it is too small: [text, ratio].
PALE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
      if (color[3] !== 0) throw new Error("half transparent background");
    }
    throw new Error("no background");
  };
  const pale = [];
  let seen = 0;
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data);
    if (!own.join("").trim() || !node.checkVisibility() || node.closest("noscript")) continue;
    seen += 1;
    const [a, b] = [rgba(getComputedStyle(node).color), behind(node)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) pale.push([own.join(""), ratio, node.className]);
  }
  if (seen < 50) throw new Error(`only ${seen} texts were there`);
  return pale;
}"""


@pytest.fixture
def server():
    found = PageServer()
    found.workers = [worker(A), worker(B)]
    found.decisions = [decision("one", candidate(A, 1408, 0.2), candidate(B, 0, 1.4))]
    found.start()
    yield found
    found.close()


@pytest.fixture
def open_page(browse, server):
    """Opens the page; at the end nothing may have gone wrong in it, but what a test expects."""
    return partial(browse, server.url)


def later(page):
    """It is time for the next round of questions."""
    page.clock.fast_forward(2100)


def rows(page):
    return page.locator("#decisions > tbody")


# Files


def test_all_files_have_a_type_a_tag_and_a_place():
    files = page_files()
    assert files["/"].content_type == "text/html; charset=utf-8"
    assert {"/page.css", "/page.js"} <= set(files)
    assert all(path == "/" or re.fullmatch(r"/page[a-z-]*\.(css|js|svg)", path) for path in files)
    assert len({file.etag for file in files.values()}) == len(files)
    for file in files.values():
        assert re.fullmatch(r'"[0-9a-f]{16}"', file.etag)
        assert b"SPDX-License-Identifier: Apache-2.0" in file.body[:120]


def test_the_page_names_its_files_relatively_and_nothing_from_elsewhere():
    files = {path: file.body.decode() for path, file in page_files().items()}
    html = files["/"]
    named = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert set(named) >= {"page.css", "page.js", "page.svg"}
    for name in named:
        assert f"/{name}" in files or name in ("workers", "decisions", "metrics")
    for path, text in files.items():
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/{name}" in files, f"{path} imports {name}"
        text = text.replace("http://www.w3.org/2000/svg", "").replace("http://10.0.0.1", "")
        assert not re.search(r"https?://[a-z0-9]|innerHTML|insertAdjacentHTML|eval\(", text), path


def test_the_policy_lets_nothing_in_from_elsewhere_and_no_inline_code():
    assert HEADERS["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert "default-src 'self'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    html = page_files()["/"].body.decode()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src=)", html)


# What it shows


def test_workers_with_all_that_is_known_of_them(open_page, server):
    server.workers = [
        worker(
            A, target(A, in_flight=7, decode_tokens=1_234_567, hit_tokens=300, prompt_tokens=400)
        ),
        worker(B, target(B, 0), target(B, 1, trusted=False, events={"gaps": 2}), state="draining"),
        worker("http://c:1", target("http://c:1", events=None), exact=False, role="prefill"),
        worker(
            "http://d:1",
            target("http://d:1", events={"connected": False}),
            state="down",
            error="connection refused",
        ),
        worker(
            "http://e:1",
            target("http://e:1", how={"full": "events", "windows": "believed"}),
            exact=False,
        ),
        worker("http://f:1", target("http://f:1", events=None)),
    ]
    page = open_page()
    expect(page.get_by_role("status").first).to_have_text("4 of 6 workers ready")
    table = page.get_by_role("table", name="Workers")
    first = table.get_by_role("row").filter(has_text="10.0.0.1:8000")
    for text in ("ready", "1,234,567", "75.0 %", "38,112", "exact", "vllm 0.32.0", "3 decoding"):
        expect(first).to_contain_text(text)
    expect(first.get_by_role("cell").nth(3)).to_have_text("73 decoding")
    second = table.locator("tbody").nth(1)
    expect(second.get_by_role("row")).to_have_count(3)
    expect(second.get_by_role("row").nth(0)).to_contain_text("draining")
    expect(second.get_by_role("row").nth(0)).to_contain_text("96,420")  # of both ranks
    expect(second.get_by_role("row").nth(1)).to_contain_text("exact")
    expect(second.get_by_role("row").nth(2)).to_contain_text("events were lost, 2 gaps")
    expect(table.locator("tbody").nth(2)).to_contain_text("approximate")
    expect(table.locator("tbody").nth(2)).to_contain_text("prefill")
    expect(table.locator("tbody").nth(2)).to_contain_text("from answers, not events")
    expect(table.locator("tbody").nth(3)).to_contain_text("events cut off")
    expect(table.locator("tbody").nth(3)).to_contain_text("connection refused")
    expect(table.locator("tbody").nth(4)).to_contain_text("windows are not told, last event")
    expect(table.locator("tbody").nth(5)).to_contain_text("no events")
    expect(page).to_have_title("(1 down) mimo router")


def test_it_follows_what_changes_by_itself(open_page, server):
    page = open_page(real_time=True)
    expect(page.locator("#workers > tbody")).to_have_count(2)
    server.workers = [worker(B, target(B, sessions=4321)), worker("http://new:1")]
    server.decisions.insert(0, decision("two", candidate(B, 64, 0.1), age_s=0))
    expect(page.locator("#workers")).to_contain_text("4,321", timeout=NEXT_MS)
    expect(page.locator("#workers > tbody th")).to_contain_text(["10.0.0.2:8000", "new:1"])
    expect(rows(page)).to_have_count(2, timeout=NEXT_MS)
    expect(rows(page).first.locator("strong")).to_have_text("10.0.0.2:8000")


def test_numbers_that_change_move_nothing(open_page, server):
    page = open_page()
    expect(rows(page)).to_have_count(1)
    where = """() => [...document.querySelectorAll("h2, thead th, .tile, tbody, tbody td")]
      .map((node) => node.getBoundingClientRect())
      .map((box) => [box.x, box.y, box.width, box.height])
    """
    before = page.evaluate(where)
    big = {
        "in_flight": 9999,
        "decoding": 9999,
        "decode_tokens": 987_654_321,
        "sessions": 99_999,
        "blocks": 9_876_543,
        "requests": 123_456,
        "wait_s": 3500.0,
        "recent_work_s": 3500.0,
        "prompt_tokens": 99_999_999_999,
        "errors": 1,
    }
    server.workers = [worker(A, target(A, **big)), worker(B, target(B, **big))]
    later(page)
    expect(page.locator("#workers")).to_contain_text("987,654,321", timeout=NEXT_MS)
    assert page.evaluate(where) == before


def test_totals_are_counted_from_what_targets_counted(open_page):
    page = open_page()
    found = page.evaluate("""async () => {
      const { History, Decisions, niceTop, quantile } = await import("./page-charts.js");
      const history = new History();
      const decisions = new Decisions();
      const target = (n, more) => ({name: "a", requests: 10 * n, hit_tokens: 600 * n,
                                    prompt_tokens: 1000 * n, in_flight: n, ...more});
      let last;
      for (let i = 0; i < 20; i++) last = history.add([target(i)], decisions, 1000 + 2 * i);
      const steady = {...last};
      // It was started again: it counts from zero, and nothing is counted twice or below zero.
      last = history.add([target(1)], decisions, 1040);
      const again = last.requests_per_s;
      // A target that is new brings what it counted before it was known; that is not of now.
      last = history.add([target(2), target(5000, {name: "b"})], decisions, 1042);
      decisions.merge([1, 2, 3, 4].map((i) =>
        ({request: `r${i}`, time_s: 1040, ttft_s: i / 10, prompt_tokens: 1, hit_tokens: 1})));
      decisions.merge([{request: "r4", time_s: 1040, ttft_s: 0.9}]);
      const first = history.add([target(3)], decisions, 1044).ttft_s;
      return {steady, again, late: last.requests_per_s, first, kept: decisions.all.length,
              tops: [0, 0.03, 1, 1.1, 2, 7, 43].map(niceTop), q: quantile([3, 1, 2], 0.9)};
    }""")
    assert found["steady"]["requests_per_s"] == pytest.approx(5)
    assert found["steady"]["hit_rate"] == pytest.approx(0.6)
    assert found["steady"]["in_flight"] == 19
    assert found["again"] == found["late"] == pytest.approx(5)
    assert found["first"] == pytest.approx(0.3)
    assert found["kept"] == 4
    assert found["tops"] == [1, pytest.approx(0.05), 1, 2, 2, 10, 50]
    assert found["q"] == 3


def test_charts_are_drawn_from_the_past_and_read_out(open_page, server):
    server.decisions = [
        decision(str(i), candidate(A, 768, 0.2), age_s=2 * i + 3, ttft_s=0.25) for i in range(100)
    ]
    page = open_page()
    chart = page.locator("#tile-ttft [role=img]")
    expect(chart).to_have_attribute(
        "aria-label",
        "Median time to first token: now 250 ms, highest 250 ms in the last five minutes",
    )
    expect(page.locator("#tile-requests [role=img]")).to_have_attribute(
        "aria-label", re.compile(r"Requests: now 0\.\d /s, highest 0\.5 /s")
    )
    expect(page.locator("#tile-hits [data-note]")).to_contain_text("100 of 100 as forecast")
    box = chart.bounding_box()
    line = page.locator("#tile-ttft .line").bounding_box()
    assert line["width"] == pytest.approx(box["width"] * 200 / 300, rel=0.05)
    assert abs(line["y"] - (box["y"] + box["height"] / 2)) < 0.25 * box["height"]
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 10)
    expect(chart.locator(".read")).to_have_text(re.compile(r"^250 ms, 1[12]\d s ago$"))


def test_a_chart_has_holes_where_nothing_was_known(open_page):
    page = open_page()
    lines = page.evaluate("""async () => {
      const { Chart } = await import("./page-charts.js");
      const place = document.querySelector("#tile-ttft [data-chart]").cloneNode();
      document.querySelector("#tile-ttft").append(place);
      const chart = new Chart(place, "x", "X", String);
      const at = (time_s, x) => ({time_s, x});
      const drawn = (samples) => {
        chart.update(samples, 100);
        return place.querySelectorAll(".line").length;
      };
      return [
        drawn([]),
        drawn([at(2, 1), at(4, 2), at(6, 1)]),
        drawn([at(2, 1), at(4, null), at(6, 1)]),
        drawn([at(2, 1), at(4, 2), at(60, 1), at(62, 1)]),
      ];
    }""")
    assert lines == [0, 1, 2, 2]


# Decisions


MOST = "cheapest — 1,408 of 1,536 tokens are there"
NONE = "none of its 1,536 tokens are there"
TIE = "as cheap as others"
TO_B = candidate(B, 1408, 0.5, wait_s=0.2)
REASONS = [
    (decision("", TO_B, candidate(A, 0, 1.0)), MOST),
    (
        decision("", TO_B, candidate(A, 1520, 4.0, wait_s=3.2)),
        f"{MOST}; 10.0.0.1:8000 has 1,520, but a wait of 3.2 s",
    ),
    (
        decision("", TO_B, candidate(f"{A}#1", 1520, 0.6, in_bound=False)),
        f"{MOST}; 10.0.0.1:8000 rank 1 has 1,520, but its share of the chats too",
    ),
    (
        decision("", TO_B, candidate(A, 1520, 0.6, wait_s=0, media_s=0.2)),
        f"{MOST}; 10.0.0.1:8000 has 1,520, but not the images",
    ),
    (
        decision("", TO_B | {"reserved": True}, reason="session"),
        f"{TIE}, and the chat was here before — 1,408 of 1,536 tokens are on their way there",
    ),
    (
        decision("", candidate(B, 0, 0.5), candidate(A, 0, 0.5), reason="chance"),
        f"{TIE}, by chance — none of its 1,536 tokens are anywhere",
    ),
    (
        decision("", candidate(B, 0, 0.5), candidate(A, 9, 0.6, wait_s=0), reason="work"),
        f"{TIE}, with least work lately — {NONE}; 10.0.0.1:8000 has 9, but costs more",
    ),
    (
        decision("", TO_B, reason="prefix", retries=2),
        f"{TIE}, with most of it in full attention — {MOST[11:]} (after 2 retries)",
    ),
    (
        decision("", TO_B, reason="only", prompt_tokens=0),
        "the only one that could take it — its tokens are not known",
    ),
    (
        decision("", TO_B, reason="owner", retries=1),
        f"keeps its images and videos — {MOST[11:]} (after 1 retry)",
    ),
    (
        decision("", TO_B, target=None, reason=None, hit_tokens=0, status=503),
        "no worker could take it",
    ),
    # One that a later router may have.
    (decision("", TO_B, reason="constructor"), f"constructor — {MOST[11:]}"),
]


def test_reasons_in_plain_words(open_page):
    found = open_page().evaluate(
        'async (all) => { const { why } = await import("./page-words.js"); return all.map(why); }',
        [one for one, _ in REASONS],
    )
    assert found == [words for _, words in REASONS]


def test_every_reason_of_the_router_has_words():
    text = page_files()["/page-words.js"].body.decode()
    reasons = set(re.findall(r"``(\w+)``", str(Decision.__doc__))) - {"q"}
    assert {"only", "cost", "session"} < reasons
    assert set(re.findall(r'^  \["(\w+)",', text, re.M)) == reasons


def test_a_decision_opens_to_all_its_candidates(open_page, server):
    server.decisions = [
        decision(
            "req-1",
            candidate(B, 1408, 0.31, wait_s=0.1, prefill_s=0.06),
            candidate(A, 1024, 1.24, wait_s=1.0, prefill_s=0.07, media_s=0.01, reserved=True),
            candidate(f"{A}#1", 0, 2.0, in_bound=False),
            predicted_hit_tokens=1408,
            actual_hit_tokens=1344,
        )
    ]
    page = open_page()
    row = rows(page).first
    expect(row).to_contain_text("cheapest — 1,408 of 1,536 tokens are there")
    expect(row).to_contain_text("1,344 of 1,536")
    expect(row).to_contain_text("forecast 1,408")
    button = row.get_by_role("button", name=re.compile("^Candidates of the request at"))
    expect(button).to_have_attribute("aria-expanded", "false")
    expect(row.locator(".candidates")).to_have_count(0)
    row.locator(".c-why").click()
    expect(button).to_have_attribute("aria-expanded", "true")
    table = row.get_by_role("table")
    found = [line.all_inner_texts() for line in table.get_by_role("row").all()]
    assert len(found) == 4
    cells = [table.get_by_role("row").nth(i).locator("th, td").all_inner_texts() for i in range(4)]
    assert cells[0][:6] == ["Worker", "Hit tokens", "Wait", "Prefill", "Media", "Cost"]
    assert cells[1][:6] == ["10.0.0.2:8000", "1,408", "100 ms", "60 ms", "0 s", "310 ms"]
    assert cells[1][7] == "chosen"
    assert cells[2][:6] == ["10.0.0.1:8000", "1,024", "1.0 s", "70 ms", "10 ms", "1.2 s"]
    assert cells[2][7] == "hit is on its way"
    assert cells[3][0] == "10.0.0.1:8000 rank 1"
    assert cells[3][7] == "has its share of the chats"
    expect(row.locator(".facts")).to_contain_text("wait + media + 3.5 × prefill")
    widths = [
        box.bounding_box()["width"]
        for box in table.locator("tbody tr").nth(1).locator(".stack span").all()
    ]
    whole = table.locator(".stack").nth(1).bounding_box()["width"]
    assert [w / whole for w in widths] == pytest.approx([0.5, 0.005, 0.115], abs=0.01)
    row.locator(".c-why").click()
    expect(button).to_have_attribute("aria-expanded", "false")
    expect(table).to_be_hidden()


def test_the_keyboard_opens_one_and_it_stays_where_it_is(open_page, server):
    page = open_page()
    button = rows(page).first.get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    detail = rows(page).first.locator(".candidates")
    before = detail.bounding_box()
    old = server.decisions[0]
    server.decisions = [
        decision("three", candidate(A, 0, 1.0), age_s=0),
        decision("two", candidate(A, 0, 1.0), age_s=0),
        old | {"ttft_s": 7.0},
    ]
    later(page)
    newer = page.get_by_role("button", name="Show 2 newer")
    expect(newer).to_be_visible(timeout=NEXT_MS)
    expect(rows(page)).to_have_count(1)
    expect(rows(page).first).to_contain_text("7.0 s")  # what is there goes on
    assert detail.bounding_box() == before
    expect(button).to_be_focused()
    newer.click()
    expect(rows(page)).to_have_count(3)
    expect(newer).to_be_hidden()


def test_filter_and_more(open_page, server):
    server.decisions = [
        decision(f"r{i}", candidate(A if i % 2 else B, 0, 1.0), age_s=i, session=f"chat-{i}")
        for i in range(45)
    ]
    page = open_page()
    expect(rows(page)).to_have_count(20)
    page.get_by_role("button", name="Show more").click()
    expect(rows(page)).to_have_count(40)
    page.get_by_role("button", name="Show more").click()
    expect(rows(page)).to_have_count(45)
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()
    page.get_by_label("Filter").fill("CHAT-44")
    expect(rows(page)).to_have_count(1)
    page.get_by_label("Filter").fill("nothing of the kind")
    expect(rows(page)).to_have_count(0)
    expect(page.get_by_text("None fits the filter.")).to_be_visible()


def test_text_of_others_is_text(open_page, server):
    server.workers = [
        worker(
            f"http://{HOSTILE}",
            target(f"http://{HOSTILE}"),
            **dict.fromkeys(("state", "role", "model", "engine", "version"), HOSTILE),
        ),
        worker(B, model="another", state="constructor"),
    ]
    server.decisions = [
        decision(
            HOSTILE,
            candidate(HOSTILE, 5, 1.0),
            candidate(B, 0, 2.0),
            **dict.fromkeys(("session", "model", "path", "reason", "status"), HOSTILE),
        )
    ]
    server.resident = {
        "prompt_tokens": 9,
        "targets": {HOSTILE: {"hit_tokens": 1, "full_tokens": 2}},
    }
    server.key = "right"
    page = open_page()
    rows(page).first.locator(".c-why").click()
    page.get_by_label("A prompt, or").fill("x")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator(".found tbody th")).to_have_text(HOSTILE)
    expect(page.locator("#workers tbody th .name").first).to_have_text(HOSTILE)
    expect(page.locator("#workers .state").nth(0)).to_have_text(HOSTILE)
    expect(page.locator("#workers .state").nth(1)).to_have_text("constructor")
    for text in (rows(page).first.locator(".c-why"), page.locator(".candidates tbody th").first):
        expect(text).to_contain_text(HOSTILE)
    expect(page.locator("#model option").first).to_have_text(HOSTILE)
    assert page.evaluate("document.images.length") == 1  # our own sign
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert page.evaluate("window.hostile") is None


# What is resident


@pytest.mark.parametrize(
    ("text", "kind", "sent"),
    [
        ("Hello [there]", "a prompt", '{"model":"%s","prompt":"Hello [there]"}'),
        ("7", "a prompt", '{"model":"%s","prompt":"7"}'),
        (
            '[{"role": "user", "content": "Hi"}]',
            "1 message",
            '{"model":"%s","messages":[{"role":"user","content":"Hi"}]}',
        ),
        ('{"model": "m", "messages": []}', "0 messages", '{"model":"m","messages":[]}'),
    ],
)
def test_what_is_resident_of_a_prompt(open_page, server, text, kind, sent):
    server.resident = {
        "prompt_tokens": 1536,
        "targets": {
            A: {"hit_tokens": 512, "full_tokens": 1376},
            f"{B}#1": {"hit_tokens": 1408, "full_tokens": 1504},
        },
    }
    page = open_page()
    expect(rows(page)).to_have_count(1)
    page.get_by_label("A prompt, or a JSON list of messages").fill(text)
    expect(page.get_by_text(f"Sent as {kind}.")).to_be_visible()
    page.get_by_role("button", name="Look up").click()
    lines = page.locator(".found tbody tr")
    expect(lines).to_have_count(2)
    assert lines.nth(0).locator("th, td").all_inner_texts() == [
        "10.0.0.2:8000 rank 1",
        "1,408",
        "1,504",
        "128",
    ]
    assert lines.nth(1).locator("th, td").all_inner_texts()[1:] == ["512", "1,376", "1,024"]
    ((path, headers, body),) = server.posted
    assert path == "/resident"
    assert headers["Content-Type"] == "application/json"
    assert body == (sent.replace("%s", server.workers[0]["model"]))


# Drain


def test_drain_and_resume(open_page, server):
    page = open_page()
    page.get_by_role("button", name="Drain 10.0.0.2:8000").focus()
    page.keyboard.press("Enter")
    resume = page.get_by_role("button", name="Resume 10.0.0.2:8000")
    expect(resume).to_be_visible(timeout=NEXT_MS)
    expect(resume).to_be_focused()
    expect(page.locator("#workers .state")).to_have_text(["ready", "draining"])
    expect(page.locator("#said")).to_have_text(
        "10.0.0.2:8000 gets nothing new; what it has goes on."
    )
    resume.click()
    expect(page.locator("#workers .state")).to_have_text(["ready", "ready"], timeout=NEXT_MS)
    paths = [path for path, _, _ in server.posted]
    query = "/workers/drain?url=http%3A%2F%2F10.0.0.2%3A8000&on="
    assert paths == [f"{query}true", f"{query}false"]
    assert {headers["X-Mimo-Router"] for _, headers, _ in server.posted} == {"page"}
    assert all("Authorization" not in headers for _, headers, _ in server.posted)


def test_a_key_is_asked_for_when_the_router_wants_one(open_page, server):
    server.key = "right"
    page = open_page(expected="status of 401")
    drain = page.get_by_role("button", name="Drain 10.0.0.1:8000")
    drain.click()
    dialog = page.get_by_role("dialog", name="The router wants a key")
    expect(dialog).to_contain_text("It answered 401: admin key: found none or a wrong one")
    expect(page.get_by_label("Admin key")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("#said")).to_contain_text("10.0.0.1:8000 is as it was: 401")
    drain.click()
    page.get_by_label("Admin key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Admin key")).to_have_value("")
    expect(dialog).to_be_visible()
    page.get_by_label("Admin key").fill("right")
    dialog.get_by_role("button", name="Use it").click()
    expect(page.locator("#workers .state").first).to_have_text("draining", timeout=NEXT_MS)
    expect(dialog).to_be_hidden()
    # It is known from now on, and kept nowhere.
    page.get_by_role("button", name="Resume 10.0.0.1:8000").click()
    expect(page.locator("#workers .state").first).to_have_text("ready", timeout=NEXT_MS)
    keys = [headers.get("Authorization") for _, headers, _ in server.posted]
    assert keys == [None, None, "Bearer wrong", "Bearer right", "Bearer right"]
    assert (
        page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    )


def test_a_router_that_shows_nothing_without_a_key(open_page, server):
    server.key, server.guard_all = "right", True
    page = open_page(expected="status of 401")
    expect(page.get_by_role("alert")).to_contain_text("The router answered 401.")
    page.get_by_role("button", name="Enter a key").click()
    page.get_by_label("Admin key").fill("right")
    page.keyboard.press("Enter")
    expect(page.locator("#workers > tbody")).to_have_count(2, timeout=NEXT_MS)
    expect(page.locator("#banner")).to_be_hidden()


# When things go wrong


def test_the_router_is_gone_and_comes_back(open_page, server):
    page = open_page(expected="ERR_CONNECTION_|ERR_EMPTY_RESPONSE", real_time=True)
    expect(page.locator("#workers > tbody")).to_have_count(2)
    server.stop()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The router can't be reached.", timeout=NEXT_MS)
    expect(alert).to_contain_text("What is shown is from")
    expect(page.locator("#health")).to_have_text("Unreachable")
    expect(page.locator("#workers > tbody")).to_have_count(2)
    page.get_by_role("button", name="Drain 10.0.0.1:8000").click()
    expect(page.locator("#said")).to_have_text(
        "10.0.0.1:8000 is as it was: the router can't be reached"
    )
    server.workers = [worker("http://after:1")]
    server.start()
    expect(page.locator("#banner")).to_be_hidden(timeout=NEXT_MS)
    expect(page.locator("#workers > tbody th")).to_contain_text(["after:1"])
    expect(page.locator("#health")).to_have_text("1 of 1 worker ready")


def test_an_answer_that_is_none(open_page, server):
    server.broken = True
    page = open_page(expected="SyntaxError")
    expect(page.get_by_role("alert")).to_contain_text("The router's answer can't be read.")
    server.broken = False
    later(page)
    expect(page.locator("#banner")).to_be_hidden(timeout=NEXT_MS)


def test_pause(open_page, server):
    page = open_page()
    expect(rows(page)).to_have_count(1)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#updated")).to_contain_text("Paused at")
    asked = server.polls
    for _ in range(3):
        later(page)
    page.wait_for_timeout(300)
    assert server.polls == asked
    # Also when an answer was still to come.
    server.slow_s = 0.3
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(600)
    asked = server.polls
    later(page)
    page.wait_for_timeout(300)
    assert server.polls == asked
    expect(page.locator("#updated")).to_contain_text("Paused at")
    server.slow_s = 0.0
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#updated")).to_contain_text("As of")
    assert server.polls == asked + 1


def test_nobody_there_yet(open_page, server):
    server.workers, server.decisions = [], []
    page = open_page()
    expect(page.locator("#health")).to_have_text("No workers")
    expect(page.get_by_text("No workers. Add one")).to_be_visible()
    expect(page.get_by_text("No requests yet.")).to_be_visible()


# For everybody


def busy(open_page, server, *arguments, **options):
    """The page with all that it can show."""
    server.workers, server.decisions, server.resident = example()
    server.workers[0]["state"] = "down"
    page = open_page(*arguments, **options)
    expect(rows(page).nth(5)).to_be_visible(timeout=NEXT_MS)
    rows(page).nth(1).locator(".c-why").click()
    page.get_by_label("A prompt, or").fill("x")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator(".found tbody tr")).to_have_count(5)
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_text_has_contrast(open_page, server, scheme, width):
    gone = "ERR_CONNECTION_|ERR_EMPTY_RESPONSE"
    page = busy(open_page, server, width, expected=gone, color_scheme=scheme)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 17)"
    assert dark == (scheme == "dark")
    assert page.evaluate(PALE) == []
    page.get_by_role("button", name="Drain 10.0.0.2:8000").click()
    expect(page.locator("#said")).to_be_visible()
    assert page.evaluate(PALE) == []
    server.stop()
    later(page)
    expect(page.get_by_role("alert")).to_be_visible(timeout=NEXT_MS)
    assert page.evaluate(PALE) == []


@pytest.mark.parametrize("width", [320, 390, 700, 1000, 1280])
def test_nothing_is_wider_than_the_window(open_page, server, width):
    page = busy(open_page, server, width)
    long = "a_very_long_name_without_a_gap_" * 12
    server.workers.append(worker(f"http://{long}", model=long, version=long))
    server.decisions.insert(
        0,
        decision(long, candidate(f"http://{long}", 1, 1.0), age_s=0, session=long, model=long),
    )
    later(page)
    page.get_by_role("button", name="Show 1 newer").click(timeout=NEXT_MS)
    rows(page).first.locator(".c-target").click()
    expect(rows(page).first.locator(".candidates")).to_be_visible()
    wide, there = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= there
    # Nor does any text run out of its box.
    assert (
        page.evaluate("""() => [...document.querySelectorAll("th, td, p, h2, dd, button")]
          .filter((node) => node.checkVisibility() && node.scrollWidth > node.clientWidth + 1)
          .filter((node) => getComputedStyle(node).overflow !== "hidden" && node.clientWidth > 0)
          .map((node) => [node.className, node.textContent.slice(0, 80)])""")
        == []
    )


def test_what_a_screen_reader_finds(open_page, server):
    page = busy(open_page, server)
    assert page.evaluate("document.documentElement.lang") == "en"
    for name, columns in (("Workers", 11), ("Recent decisions", 8)):
        table = page.get_by_role("table", name=name)
        headers = table.locator("thead").first.get_by_role("columnheader")
        assert headers.count() == columns
        assert all(text.strip() for text in headers.all_text_contents())
    for control in page.locator("button, input, select, textarea").all():
        if control.is_visible():
            snapshot = control.aria_snapshot()
            assert re.search(r'"[^"]+"', snapshot), snapshot
    headings = [
        int(tag[1])
        for tag in page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)")
    ]
    assert headings[0] == 1
    assert headings.count(1) == 1
    # Cards keep the roles that, in some browsers, their looks take from them.
    parts = "table, thead, tbody, tr, th, td"
    everywhere = "(all) => all.length && all.every((one) => one.hasAttribute('role'))"
    assert page.locator(parts).evaluate_all(everywhere)
    page.set_viewport_size({"width": 390, "height": 844})
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")
    nodes = {node["nodeId"]: node for node in tree["nodes"]}

    def count_roles(root):
        roles = Counter([root["role"]["value"]])
        for child in root.get("childIds", ()):
            roles += count_roles(nodes[child])
        return roles

    tables = {
        node["name"]["value"]: count_roles(node)
        for node in nodes.values()
        if node.get("role", {}).get("value") == "table"
    }
    workers = tables["Workers"]
    assert (workers["columnheader"], workers["rowheader"], workers["row"]) == (11, 6, 7)
    assert workers["cell"] == 4 * 10 + 2 * 8  # a rank has no state and no button of its own
    assert tables["Recent decisions"]["columnheader"] == 8 + 8  # with the one inside


def test_focus_is_seen(open_page):
    page = open_page()
    expect(rows(page)).to_have_count(1)
    seen = []
    for _ in range(9):
        page.keyboard.press("Tab")
        name, style, width = page.evaluate("""() => {
          const node = document.activeElement;
          const {outlineStyle, outlineWidth} = getComputedStyle(node);
          const name = node.getAttribute("aria-label") ?? node.id;
          return [name, outlineStyle, outlineWidth];
        }""")
        seen.append(re.sub(r" at .*", "", name or "submit"))
        assert (style, width) == ("solid", "2px"), name
        if seen[-1] == "submit":
            break
    assert seen == [
        "pause",
        "Drain 10.0.0.1:8000",
        "Drain 10.0.0.2:8000",
        "filter",
        "Candidates of the request",
        "prompt",
        "submit",
    ]
