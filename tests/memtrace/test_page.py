"""report --html: one page that needs nothing else, and says what the trace says."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest

from traces import MILLISECOND, Script, _trace, a_job, memtrace_run, record

SIZE = 1 << 20
VOID = {"meta", "br", "link", "img", "input"}


class Page(html.parser.HTMLParser):
    """Elements in order, as (tag, attributes, text), each with its own end."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.text = path.read_text(encoding="utf-8")
        self.open, self.elements = [], []
        self.feed(self.text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    @property
    def data(self):
        (text,) = (text for tag, attrs, text in self.elements if tag == "script" and attrs.get("id") == "data")
        return json.loads(text)

    def rows(self, n):
        """The cells of table n, with its head."""
        table = self.text.split("<table>")[n + 1].split("</table>")[0]
        return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.split("<tr[^>]*>", table)[1:]]


def page_of(trace, *options):
    out = trace.with_suffix(".html")
    done = memtrace_run("report", trace, "--html", out, *options)
    assert done.returncode == 0 and not done.stdout, done.stderr
    return Page(out)


def expanded(runs, columns):
    """What `runs` says of each column."""
    ends = [*runs[2::2], columns]
    return [value for begin, value, end in zip(runs[::2], runs[1::2], ends) for _ in range(end - begin)]


def test_the_page_needs_nothing_else(job):
    page = page_of(job)
    for tag, attrs, _ in page.elements:
        assert not attrs.keys() & {"src", "href", "data", "action"} and tag not in ("link", "iframe", "img"), (
            tag,
            attrs,
        )
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest", page.text)


def test_the_timeline_is_the_trace_s(job):
    data = page_of(job).data
    file = _trace.file_open(str(job))
    assert [p["label"] for p in data["processes"]] == ["rank 0", "rank 1"]
    for i, drawn in enumerate(data["processes"]):
        columns = drawn["columns"]
        series = _trace.series(file, i, columns)
        assert {r["name"]: expanded(r["runs"], columns) for r in drawn["regions"]} == {
            row["name"]: list(row["tiers"]) for row in series["rows"]
        }
        width = drawn["seconds"] / columns
        for link in drawn["links"]:
            moved = sum(memoryview(series["columns"][0][link["name"]]).cast("d"))
            assert sum(expanded(link["runs"], columns)) * width == pytest.approx(moved, rel=1e-3)
        assert {link["name"] for link in drawn["links"]} == set(series["columns"][0])
        waited = sum(expanded(drawn["waits"], columns)) * width
        assert waited == pytest.approx((4 * 1 + 2 * 0.5) / 1e3, rel=0.05), "four stalls and two agreements"
        assert len(drawn["steps"]) == 2
    assert [tier["name"] for tier in data["tiers"]] == _trace.tiers()


def test_the_tables_are_the_report_s(job):
    page, report = page_of(job), json.loads(memtrace_run("report", job, "--json").stdout)
    waits, *longest, steps, regions = (page.rows(n) for n in range(page.text.count("<table>")))
    assert waits[1:] == [
        ["the compute stream", "until the region was ready", "8.0 ms", "8"],
        ["the host (agreement)", "the ranks agreed on what is stale", "2.0 ms", "4"],
    ]
    assert sum(len(rows) - 1 for rows in longest) == len(report["stalls"]) == 10
    assert len(steps) - 1 == len(report["steps"]) and len(regions) - 1 == len(report["regions"])
    assert "75 %" in page.text and "saved between nodes" in page.text
    assert page.text.count("<details") == len({stall["reason"] for stall in report["stalls"]}) == len(longest)


def test_names_are_texts_and_nothing_else(tmp_path):
    name = '</script><script>alert("x")</script> & {{data}} \u00e9'
    script = Script()
    script.object(1, name, size=SIZE)
    script.event("region_create", object=1, bytes=SIZE)
    script.state(1, SIZE, 0, 2)
    script.event("stall", stream="compute", object=1, duration_ns=MILLISECOND)
    record(tmp_path / "x.trace", script)
    page = page_of(tmp_path / "x.trace")
    assert [tag for tag, *_ in page.elements].count("script") == 2
    assert [region["name"] for region in page.data["processes"][0]["regions"]] == [name]


def test_a_trace_without_events_has_a_page(tmp_path):
    record(tmp_path / "x.trace", Script())
    page = page_of(tmp_path / "x.trace")
    assert page.data["processes"] == [] and "No wait was recorded" in page.text


def test_a_page_does_not_replace_its_trace(job):
    before = job.read_bytes()
    done = memtrace_run("report", job, "--html", job)
    assert done.returncode == 1 and "is the file that is read" in done.stderr
    assert job.read_bytes() == before


def test_a_browser_draws_it(tmp_path):
    """The script runs to its end: the choice of ranks, the legend and the shown time are its work."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here, which runs the page's script")
    script = a_job()
    script.counter("device.budget_bytes", 3 * SIZE)
    script.event("reduce_scatter", bytes=900, a=900, b=2)
    record(tmp_path / "x.trace", script)
    page = page_of(tmp_path / "x.trace")
    click = "<script>document.querySelector('tr[data-at]').click()</script></body>"
    (tmp_path / "y.html").write_text(page.text.replace("</body>", click))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--enable-logging=stderr"]
    shown = []
    for name in ("x.html", "y.html"):
        done = subprocess.run(
            [browser, *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/{name}"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
        assert ">rank 0</option>" in done.stdout and "gathered parameters</span>" in done.stdout
        shown.append(re.search(r'id="span">([^<]*)<', done.stdout)[1])
    assert re.fullmatch(r"0\.00 ms to \d+\.\d+ ms", shown[0]), "the whole"
    begin, end = (float(ms) for ms in re.fullmatch(r"(\S+) ms to (\S+) ms", shown[1]).groups())
    assert end - begin == pytest.approx(5, rel=0.01), "a wait of one millisecond, and two of them to each side"
