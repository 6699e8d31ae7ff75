"""The end of tools/test.sh: what was skipped and why, what failed, and a line for each step.

python tools/summary.py FILE, which tools/step has written: a line for each step, of its status, seconds, log and title.
Beside a log lies the report of ctest or pytest, as JUnit's XML, if the step was one of these. Exit status: 0 where
nothing failed."""

import collections
import pathlib
import sys
import xml.etree.ElementTree as tree

VERDICTS = {0: "passed", 5: "skipped", 77: "skipped"}  # 5: pytest's, of no test selected; 77: as of a C test


def last_lines(text, n):
    return (text or "").strip().splitlines()[-n:] or ["it said nothing"]


class Step:
    def __init__(self, line):
        status, seconds, log, self.title = line.rstrip("\n").split("\t")
        self.verdict, self.seconds, self.log = VERDICTS.get(int(status), "FAILED"), int(seconds), pathlib.Path(log)
        report = self.log.with_suffix(".xml")
        self.tests = [*tree.parse(report).iter("testcase")] if report.exists() else []

    def said(self, n):
        return last_lines(self.log.read_text(errors="replace"), n)

    def reasons(self):
        """Why tests were skipped. A C test's last line says it."""
        for test in self.tests:
            if (skipped := test.find("skipped")) is not None:
                of_pytest = skipped.text and skipped.get("message")
                yield of_pytest or last_lines(test.findtext("system-out"), 1)[0]
        if self.verdict == "skipped":
            yield self.said(1)[0]

    def failures(self):
        """(name, its last lines) of each test that failed; where none did, of the step."""
        found = []
        for test in self.tests:
            for failure in [*test.iter("failure"), *test.iter("error")]:
                name = " ".join(filter(None, (test.get("classname"), test.get("name"))))
                found.append((name, last_lines(failure.text or test.findtext("system-out"), 12)))
        return found or [(self.log, self.said(12))] * (self.verdict == "FAILED")

    def line(self):
        n_skipped = sum(test.find("skipped") is not None for test in self.tests)
        counts = f"{len(self.tests)} tests, of them {n_skipped} skipped " if self.tests else ""
        return f"{self.title:<38} {self.verdict:<8} {counts}({self.seconds} s)"


def main():
    steps = [Step(line) for line in pathlib.Path(sys.argv[1]).open()]
    skipped = collections.Counter((step.title, reason) for step in steps for reason in step.reasons())
    if skipped:
        print("Skipped:")
    for (title, reason), n in skipped.items():
        print(f"  {title}: {reason}" + (f" ({n} times)" if n > 1 else ""))
    for step in steps:
        for name, lines in step.failures():
            print(f"Failed: {step.title}: {name}", *lines, sep="\n    ")
    print("Summary:")
    for step in steps:
        print(f"  {step.line()}")
        for name, _ in step.failures():  # again: the last lines of a log alone are often all that is shown
            print(f"      {name}")
    verdicts = {step.verdict for step in steps}
    print("FAILED." if "FAILED" in verdicts else "All that ran passed." if "passed" in verdicts else "Nothing ran.")
    return "FAILED" in verdicts


if __name__ == "__main__":
    sys.exit(main())
